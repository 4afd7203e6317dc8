"""Generation with a model that the swarm hosts: sessions over stages, with key and value caches and failover."""
