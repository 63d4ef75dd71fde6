//! The GPUs of a mesh's processes. The processes exchange them before NCCL starts, because NCCL
//! rejects two processes on one GPU with an error that names neither process.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{BuildHasher, RandomState},
};

use candle_core::CudaDevice;
use serde::{Deserialize, Serialize};

/// A process and its GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerInfo {
    /// A random number that distinguishes this process from the processes of earlier starts.
    token: u64,
    /// NVIDIA's unique id of the GPU.
    uuid: [u8; 16],
    /// The index of the device among the devices that the process sees.
    device: usize,
    /// The host name of the machine.
    host: String,
}

impl PeerInfo {
    /// Describes this process, which uses `device`.
    pub(super) fn on(device: &CudaDevice) -> Result<Self, String> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let uuid =
            context.uuid().map_err(|error| format!("cannot read the UUID of the GPU: {error}"))?;
        Ok(Self {
            token: token(),
            // The bytes are `c_char`, which is signed on some platforms.
            uuid: uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())),
            device: context.ordinal(),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
        })
    }
}

/// Returns a random number that no other start of a mesh has.
pub(super) fn token() -> u64 {
    // The keys of hash maps are the standard library's only source of randomness.
    RandomState::new().hash_one(())
}

impl fmt::Display for PeerInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {} of {}", self.device, self.host)
    }
}

/// Rejects processes that share a GPU, given all processes by rank.
pub(super) fn check_distinct_gpus(peers: &[PeerInfo]) -> Result<(), String> {
    let mut ranks: BTreeMap<[u8; 16], usize> = BTreeMap::new();
    for (rank, peer) in peers.iter().enumerate() {
        if let Some(first) = ranks.insert(peer.uuid, rank) {
            let first_peer = &peers[first];
            return Err(format!(
                "rank {first} ({first_peer}) and rank {rank} ({peer}) take the same GPU, but NCCL needs one \
                 for each process: start as many processes on a machine as it has GPUs, and pass the \
                 local rank as the device"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns a process on this GPU.
    pub(in super::super) fn peer(gpu: u8, host: &str) -> PeerInfo {
        PeerInfo { token: token(), uuid: [gpu; 16], device: 3, host: host.into() }
    }

    #[test]
    fn shared_gpu_is_rejected_by_name() {
        let all = [peer(1, "a"), peer(2, "a"), peer(1, "b")];
        assert_eq!(check_distinct_gpus(&all[..2]), Ok(()));
        let error = check_distinct_gpus(&all).unwrap_err();
        let text = "rank 0 (CUDA device 3 of a) and rank 2 (CUDA device 3 of b) take the same GPU";
        assert!(error.starts_with(text), "{error}");
    }

    #[test]
    fn restarted_process_differs() {
        assert_ne!(peer(1, "a"), peer(1, "a"));
    }
}
