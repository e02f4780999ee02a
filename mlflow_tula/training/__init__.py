"""What runs inside a training run; `mlflow_tula.train` is the way in.

    facts.py      Schedule, Limits, events, records, the result: plain JSON, no torch
    plans.py      BatchPlan: how a global batch is cut, for any number of ranks
    elastic.py    how a training goes on when ranks fail
    parent.py     the parent's side: events and signals
    worker.py     the entry point of each rank's process
    loop.py       steps, epochs, checkpoints, agreement between ranks
    progress.py   position, sums and records: what a checkpoint remembers beside the weights
    recipe.py     learning rate, gradient norm and variability, clipping, update
    sharding.py   which samples a rank sees in which pass
    watch.py      whose steps take longest; balance.py: local batches that make them equal
    states.py     model and optimizer as a checkpoint holds them, sharded or not
    peers.py      sums over ranks, the step clock, memory

Only facts, plans, elastic, parent and balance may be imported without paying for torch.
"""
