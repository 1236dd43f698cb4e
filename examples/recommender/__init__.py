"""A recommender as a user of Shardyard writes it: `data` gives batches, `model` their loss, `score` its ranking."""
