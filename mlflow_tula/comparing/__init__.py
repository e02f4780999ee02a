"""The parts of `compare`: small real tasks, one training run, its record, and what to make of many.

facts       Task, Trial, Outcome: what was asked, what came out (no torch)
records     a JSON-lines file of outcomes that survives a kill at any point
data        whole datasets in memory, split into training, validation and test
networks    small networks that train in seconds on one core
trial       one training run
local_steps post-local SGD's ranks, simulated in one process
grids       the settings each method is tried with on the validation split
summary     means, deviations, the share of the gap recovered
figures     accuracy against batch size, sweeps
"""
