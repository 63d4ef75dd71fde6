//! Who the processes of a mesh are before they can talk: NCCL refuses two on one GPU, with an error
//! that names neither.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{BuildHasher, RandomState},
};

use candle_core::CudaDevice;
use serde::{Deserialize, Serialize};

/// A process's GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Peer {
    /// A random number, by which a process tells itself from one of an earlier start.
    token: u64,
    /// NVIDIA's number of the GPU, which no other has.
    uuid: [u8; 16],
    /// Which of the devices that the process sees.
    device: usize,
    /// The name of its machine.
    host: String,
}

impl Peer {
    /// This process, which takes that device.
    pub(super) fn on(device: &CudaDevice) -> Result<Self, String> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let uuid =
            context.uuid().map_err(|error| format!("its GPU does not say who it is: {error}"))?;
        Ok(Self {
            token: token(),
            uuid: uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())),
            device: context.ordinal(),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
        })
    }
}

/// A number that no other start of a mesh has.
pub(super) fn token() -> u64 {
    // The standard library's one source of randomness: the keys of its hash maps.
    RandomState::new().hash_one(())
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {} of {}", self.device, self.host)
    }
}

/// Refuses processes that share a GPU, of all processes by rank.
pub(super) fn refuse_shared(peers: &[Peer]) -> Result<(), String> {
    let mut ranks: BTreeMap<[u8; 16], usize> = BTreeMap::new();
    for (rank, peer) in peers.iter().enumerate() {
        if let Some(first) = ranks.insert(peer.uuid, rank) {
            let taken = &peers[first];
            return Err(format!(
                "rank {first} ({taken}) and rank {rank} ({peer}) take the same GPU, and NCCL needs one \
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

    /// A process on such a GPU.
    pub(in super::super) fn peer(gpu: u8, host: &str) -> Peer {
        Peer { token: token(), uuid: [gpu; 16], device: 3, host: host.into() }
    }

    #[test]
    fn two_processes_on_one_gpu_are_refused_by_name() {
        let all = [peer(1, "a"), peer(2, "a"), peer(1, "b")];
        assert_eq!(refuse_shared(&all[..2]), Ok(()));
        let error = refuse_shared(&all).unwrap_err();
        let text = "rank 0 (CUDA device 3 of a) and rank 2 (CUDA device 3 of b) take the same GPU";
        assert!(error.starts_with(text), "{error}");
    }

    #[test]
    fn a_process_is_not_one_of_an_earlier_start() {
        assert_ne!(peer(1, "a"), peer(1, "a"));
    }
}
