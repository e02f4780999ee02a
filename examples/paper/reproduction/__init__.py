"""What the paper's figures share: options, measurements, trainings, drawing and logging."""
