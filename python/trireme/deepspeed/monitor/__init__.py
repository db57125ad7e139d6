"""Programs that are told of a run's events: TensorBoard's and CSV files, Weights & Biases, Comet."""
