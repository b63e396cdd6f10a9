"""Your part: the data of a node, and the network. Everything else can stay as it is."""

from functools import cache

from pfedbayes import Classification, DataConfig, Method, Model, Net, Shards, load_shards, mlp


@cache
def load_data(client: int, clients: int) -> Shards:
    """The data of this node and of no other: here, client number `client` of the MNIST that comes with pfedbayes.

    Yours may look like this, with arrays read from wherever they lie on this node:

        return Shards.from_arrays([(x_train, y_train)], [(x_test, y_test)], num_classes=10)
    """
    everybody = load_shards(DataConfig(clients=clients))
    train, test = everybody.train[client], everybody.test[client]
    own = [(everybody.x[rows], everybody.y[rows]) for rows in (train, test)]
    return Shards.from_arrays(own[:1], own[1:], num_classes=10)


def make_model(method: Method) -> Model:
    """The network, the same on all nodes, and what its outputs mean. Any torch.nn.Module will do.

    For numbers instead of labels: Model(Net(WithNoise(module)), Regression()).
    """
    return Model(Net(mlp([784, 100, method.needs.outputs or 10])), Classification(), method.habits.pixels)
