"""Edit this file: the data of a node, and the network. Everything else can stay as it is."""

from functools import cache

from pfedbayes import Classification, DataConfig, Method, Model, Net, Shards, load_shards, mlp


@cache
def load_data(client: int, clients: int) -> Shards:
    """Return the data of this node alone: here, client number `client` of the MNIST that comes with pfedbayes.

    Yours may look like this, with arrays from files of this node:

        return Shards.from_arrays([(x_train, y_train)], [(x_test, y_test)], num_classes=10)
    """
    mnist = load_shards(DataConfig(clients=clients))
    train, test = mnist.train[client], mnist.test[client]
    own = [(mnist.x[rows], mnist.y[rows]) for rows in (train, test)]
    return Shards.from_arrays(own[:1], own[1:], num_classes=10)


def make_model(method: Method) -> Model:
    """Return the network, the same on all nodes, and its likelihood. Any torch.nn.Module works.

    For regression: Model(Net(WithNoise(module)), Regression()).
    """
    return Model(Net(mlp([784, 100, method.needs.outputs or 10])), Classification(), method.habits.pixels)
