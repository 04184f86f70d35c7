"""A stage of the pipeline with real tensors: the cut model, its transport and its engine."""
