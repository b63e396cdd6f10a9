"""How rounds are computed: batching over clients, compiled steps, CUDA graphs, deferred checks."""
