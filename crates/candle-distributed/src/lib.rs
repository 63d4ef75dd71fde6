//! Distributed training for candle: sampler, batches, sharding plan and device mesh.
