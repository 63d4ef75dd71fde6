//! Who the processes of a mesh are before they can talk: NCCL refuses two on one GPU, with an error
//! that names neither.

use std::{collections::BTreeMap, fmt, fs};

use candle_core::CudaDevice;

/// How much of a machine's name is kept: the longest that Linux has.
const HOST_BYTES: usize = 64;
const UUID_BYTES: usize = 16;

/// A process's GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Peer {
    /// NVIDIA's number of the GPU, which no other has.
    uuid: [u8; UUID_BYTES],
    /// Which of the devices that the process sees.
    device: u64,
    /// The name of its machine.
    host: String,
}

impl Peer {
    /// How many bytes every process takes.
    pub(super) const BYTES: usize = UUID_BYTES + size_of::<u64>() + HOST_BYTES;

    /// This process, which takes that device.
    pub(super) fn on(device: &CudaDevice) -> Result<Self, String> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let uuid = context.uuid().map_err(|error| error.to_string())?;
        // NCCL runs on Linux alone.
        let host = fs::read_to_string("/proc/sys/kernel/hostname")
            .map_err(|error| format!("the name of this machine: {error}"))?;
        Ok(Self {
            uuid: uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())),
            device: context.ordinal() as u64,
            host: host.trim().to_owned(),
        })
    }

    pub(super) fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..UUID_BYTES].copy_from_slice(&self.uuid);
        bytes[UUID_BYTES..][..size_of::<u64>()].copy_from_slice(&self.device.to_le_bytes());
        let host = &self.host.as_bytes()[..self.host.len().min(HOST_BYTES)];
        bytes[UUID_BYTES + size_of::<u64>()..][..host.len()].copy_from_slice(host);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let mut uuid = [0; UUID_BYTES];
        uuid.copy_from_slice(&bytes[..UUID_BYTES]);
        let mut device = [0; size_of::<u64>()];
        device.copy_from_slice(&bytes[UUID_BYTES..][..size_of::<u64>()]);
        let host = String::from_utf8_lossy(&bytes[UUID_BYTES + size_of::<u64>()..]);
        Self {
            uuid,
            device: u64::from_le_bytes(device),
            host: host.trim_end_matches('\0').to_owned(),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {} of {}", self.device, self.host)
    }
}

/// Refuses processes that share a GPU, of all processes by rank.
pub(super) fn refuse_shared(peers: &[Peer]) -> Result<(), String> {
    let mut ranks: BTreeMap<[u8; UUID_BYTES], usize> = BTreeMap::new();
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
        Peer { uuid: [gpu; UUID_BYTES], device: 3, host: host.into() }
    }

    #[test]
    fn peers_are_read_as_they_were_written() {
        for host in ["node-7", "", &"long".repeat(16)] {
            let peer = peer(9, host);
            assert_eq!(Peer::from_bytes(&peer.to_bytes()), peer);
        }
        let cut = Peer::from_bytes(&peer(9, &"x".repeat(70)).to_bytes());
        assert_eq!(cut, peer(9, &"x".repeat(64)));
    }

    #[test]
    fn two_processes_on_one_gpu_are_refused_by_name() {
        let all = [peer(1, "a"), peer(2, "a"), peer(1, "b")];
        assert_eq!(refuse_shared(&all[..2]), Ok(()));
        let error = refuse_shared(&all).unwrap_err();
        let text = "rank 0 (CUDA device 3 of a) and rank 2 (CUDA device 3 of b) take the same GPU";
        assert!(error.starts_with(text), "{error}");
    }
}
