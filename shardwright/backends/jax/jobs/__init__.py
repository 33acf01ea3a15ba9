"""Jobs in shards: models that are larger than their device, shard by shard from the host's memory."""
