"""Jobs in shards: a model that is larger than its device, shard by shard from the host's memory."""
