"""What runs inside a training run; `mlflow_tula.train` is the way in.

    facts.py      BatchPlan, Schedule, Limits, events, records, the result: plain JSON, no torch
    worker.py     the entry point of each rank's process
    loop.py       steps, epochs, checkpoints, agreement between ranks
    progress.py   position, sums and records: what a checkpoint remembers beside the weights
    recipe.py     learning rate, gradient norm and variability, clipping, update
    sharding.py   which samples a rank sees in which pass
    peers.py      sums over ranks, the step clock, memory

Only facts.py may be imported without paying for torch.
"""
