"""A recommender as a user of Shardyard writes it: `data` has batches, `model` the loss, `score` the ranking."""
