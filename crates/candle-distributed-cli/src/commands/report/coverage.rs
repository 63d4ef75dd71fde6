//! Counts how often each sequence is read in an epoch, and the share of each rank.

use candle_distributed::{
    batch::Batch,
    finetune::spec::FirstEpoch,
    types::{WorldSize, split},
};

/// Numbers of sequences by how often they are read in the first epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Coverage {
    pub(super) never: u64,
    pub(super) once: u64,
    pub(super) more_often: u64,
}

impl Coverage {
    /// Counts over the batches of an epoch.
    pub(super) fn count(epoch: &FirstEpoch) -> Self {
        let mut counts = vec![0_u64; epoch.lengths.len()];
        for &index in epoch.micro_batches.iter().flatten().flat_map(|batch| &batch.indices) {
            counts[to_usize(index)] += 1;
        }
        let n_sequences =
            |is: fn(u64) -> bool| counts.iter().filter(|&&count| is(count)).count() as u64;
        Self {
            never: n_sequences(|n| n == 0),
            once: n_sequences(|n| n == 1),
            more_often: n_sequences(|n| n > 1),
        }
    }
}

/// The sequences and tokens that one rank reads in the first epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RankShare {
    pub(super) sequences: u64,
    pub(super) tokens: u64,
}

/// Returns the shares of all ranks, in the mesh's own split of the rows of a step. The last ranks may
/// get no sequences, and read padding instead.
pub(super) fn shares(epoch: &FirstEpoch, world_size: WorldSize) -> Vec<RankShare> {
    let mut shares = vec![RankShare::default(); world_size.as_usize()];
    for batches in &epoch.micro_batches {
        let rows: Vec<&[u64]> = batches.iter().flat_map(rows).collect();
        for (share, place) in shares.iter_mut().zip(world_size.placements()) {
            let own = split::chunk(rows.len() as u64, place);
            for &index in rows[to_usize(own.start)..to_usize(own.end)].iter().copied().flatten() {
                share.sequences += 1;
                share.tokens += epoch.lengths[to_usize(index)];
            }
        }
    }
    shares
}

/// Returns the sequences of each row of a batch. A batch of one row has all of its sequences there.
fn rows(batch: &Batch) -> std::slice::Chunks<'_, u64> {
    let per_row = if batch.rows == 1 { batch.indices.len().max(1) } else { 1 };
    batch.indices.chunks(per_row)
}

/// Converts the index of an item in memory to `usize`.
#[expect(clippy::expect_used, reason = "the message says why it cannot fail")]
fn to_usize(index: u64) -> usize {
    usize::try_from(index).expect("items in memory have indices of type usize")
}

#[cfg(test)]
mod tests {
    use candle_distributed::batch::{
        BatchConfig, DynamicBatchSampler, DynamicBatchStrategy, Packing, PaddingReport,
    };

    use super::*;

    fn epoch(n_sequences: u64) -> FirstEpoch {
        let lengths: Vec<u64> = (1..=n_sequences).collect();
        let sampler =
            DynamicBatchSampler::new(&lengths, BatchConfig::default().with_max_batch_size(5))
                .unwrap();
        let batches: Vec<Batch> = sampler.iter().map(Result::unwrap).collect();
        let report = PaddingReport::from_iter(&batches);
        FirstEpoch { lengths, micro_batches: vec![batches], report }
    }

    #[test]
    fn ranks_share_all_sequences() {
        for (n_sequences, world_size) in [(0, 1), (1, 2), (12, 1), (12, 2), (12, 4), (13, 9)] {
            let epoch = epoch(n_sequences);
            let shares = shares(&epoch, WorldSize::new(world_size).unwrap());
            assert_eq!(shares.iter().map(|share| share.sequences).sum::<u64>(), n_sequences);
            assert_eq!(
                shares.iter().map(|share| share.tokens).sum::<u64>(),
                n_sequences * (n_sequences + 1) / 2
            );
            assert_eq!(
                Coverage::count(&epoch),
                Coverage { never: 0, once: n_sequences, more_often: 0 }
            );
        }
    }

    #[test]
    fn coverage_counts_missing_and_repeated_sequences() {
        let mut epoch = epoch(10);
        epoch.micro_batches[0].remove(1);
        let repeated = epoch.micro_batches[0][0].clone();
        epoch.micro_batches[0].push(repeated);
        assert_eq!(Coverage::count(&epoch), Coverage { never: 5, once: 0, more_often: 5 });
    }

    #[test]
    fn rows_are_split_like_the_mesh() {
        let padded = epoch(5);
        // Three packed rows of two sequences each.
        let config = BatchConfig::default().with_max_tokens(7);
        let config = config.with_strategy(DynamicBatchStrategy::Pack(Packing::BestFit));
        let sampler = DynamicBatchSampler::new([1_u64, 2, 3, 4, 5, 6], config).unwrap();
        let rows: Vec<Batch> = sampler.iter().map(Result::unwrap).collect();
        let report = PaddingReport::from_iter(&rows);
        let packed = FirstEpoch { lengths: (1..=6).collect(), micro_batches: vec![rows], report };
        for (epoch, world_size, expected) in
            [(padded, 4, &[(2, 3), (2, 7), (1, 5), (0, 0)][..]), (packed, 2, &[(4, 14), (2, 7)])]
        {
            let shares = shares(&epoch, WorldSize::new(world_size).unwrap());
            let shares: Vec<_> =
                shares.iter().map(|share| (share.sequences, share.tokens)).collect();
            assert_eq!(shares, expected);
        }
    }
}
