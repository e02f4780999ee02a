"""One probe: a (batch size, world size) measured by real training steps in child processes.

    settings.py   ProbeSettings: how many steps, how long, how sure
    stopping.py   StepSeries: which steps count, and when the median is known
    clock.py      DeviceClock: time that includes what the device has not finished yet
    memory.py     allocated, peak and device-used bytes
    steps.py      TrainingSteps: one optimizer step in timed parts
    probe.py      run_probe: warm-up, memory, timed steps, gradient statistics, on one rank
    worker.py     `python -m mlflow_tula.probing.worker`: a rank that serves many probes
    session.py    ProbeSession: the caller's side, restarted after a crash
    guards.py     what a probe will take, before it is begun
    own.py        your own functions as text that a child process can import

Only settings, stopping, session, guards and own may be imported without paying for torch.
"""
