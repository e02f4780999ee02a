"""What is trained: models, datasets, losses and optimizers by name, or your own by import path.

    job.py          Job: every choice of a training job, as torch-free JSON; names its workload
    resolve.py      `package.module:function` -> the function; the only place that does it
    models.py       build_model(job, num_classes), list_models()
    datasets.py     build_datasets(job) -> Datasets(train, test, ...)
    splits.py       stratified, seeded, disjoint train/test splits
    imagedata.py    in-memory image tensors: digits, Fashion-MNIST, synthetic
    loaders.py      build_loader(...): what feeds one rank
    losses.py       build_loss(job)
    optimizers.py   build_optimizer(job, parameters)
    describe.py     describe(job) -> Workload

Only job.py and resolve.py (and this file) may be imported without paying for torch.
"""
