//! Rounds of messages. A round packs the data for each rank and consumes received data, chunk by
//! chunk.

mod gather;
mod sum;

use std::ops::Range;

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result, Tensor};

pub(super) use self::{gather::GatherRound, sum::SumRound};
use super::bytes::with_part;
use crate::engine::layout::Run;

/// One round of messages, in which each rank sends words to every other rank. The words contain the
/// items of runs. Each run begins at a word, so that items of any type are aligned.
///
/// Constructors reject invalid arguments, so an error of a method is a bug in this crate.
pub(super) trait MpiRound: Send {
    /// Returns the number of words that this rank sends to rank `to`.
    fn n_outgoing(&self, to: usize) -> usize;

    /// Returns the number of words that this rank receives from rank `from`.
    fn n_incoming(&self, from: usize) -> usize;

    /// Copies a range of the words for rank `to` into `into`.
    fn pack(&self, to: usize, words: Range<usize>, into: &mut [u64]) -> Result<()>;

    /// Consumes the next chunk from each rank that has more words for this one. `chunks` are in the
    /// order of ranks.
    fn consume(&mut self, chunks: &[ReceivedChunk<'_>]) -> Result<()>;

    /// Returns the results, after all words have been consumed.
    fn finish(self: Box<Self>) -> Result<Vec<Tensor>>;
}

/// A chunk of the words received from a rank.
pub(super) struct ReceivedChunk<'a> {
    pub(super) from: usize,
    /// The range of these words among all words that the rank sends.
    pub(super) range: Range<usize>,
    pub(super) words: &'a [u64],
}

/// The part of a run that is in a chunk.
#[derive(Debug, PartialEq, Eq)]
struct ByteSpan {
    /// The index of the run among the runs of its rank.
    run_index: usize,
    /// The part's bytes within the run.
    in_run: Range<usize>,
    /// The part's bytes within the chunk.
    in_chunk: Range<usize>,
}

/// Returns the parts of runs that are in a chunk, which is a range of words, given the number of
/// bytes of each run.
fn spans_in_chunk(run_sizes: impl Iterator<Item = usize>, words: &Range<usize>) -> Vec<ByteSpan> {
    let chunk = words.start * size_of::<u64>()..words.end * size_of::<u64>();
    let mut run_start = 0;
    let mut spans = Vec::new();
    for (run_index, n_bytes) in run_sizes.enumerate() {
        let start = chunk.start.max(run_start);
        let end = chunk.end.min(run_start + n_bytes);
        if start < end {
            let in_run = start - run_start..end - run_start;
            let in_chunk = start - chunk.start..end - chunk.start;
            spans.push(ByteSpan { run_index, in_run, in_chunk });
        }
        run_start += n_bytes.next_multiple_of(size_of::<u64>());
    }
    spans
}

/// Returns the number of words of some runs, given the number of bytes of each run.
fn n_words(run_sizes: impl Iterator<Item = usize>) -> usize {
    run_sizes.map(|n_bytes| n_bytes.div_ceil(size_of::<u64>())).sum()
}

/// Copies parts of runs into a chunk. `find_run` returns the tensor of a run, and the offset of the
/// run's first byte in this tensor.
fn pack<'a>(
    spans: Vec<ByteSpan>,
    find_run: impl Fn(usize) -> (&'a Tensor, usize),
    into: &mut [u64],
) -> Result<()> {
    let chunk: &mut [u8] = cast_slice_mut(into);
    for ByteSpan { run_index, in_run, in_chunk } in spans {
        let (x, start) = find_run(run_index);
        with_part(x, start + in_run.start..start + in_run.end, |bytes| {
            chunk[in_chunk].copy_from_slice(bytes);
            Ok(())
        })?;
    }
    Ok(())
}

/// Returns the range of bytes that each run has in its tensor.
fn byte_ranges<'a>(
    runs: &'a [Run],
    dtype_of: impl Fn(usize) -> DType + 'a,
) -> impl Iterator<Item = Range<usize>> + 'a {
    runs.iter().map(move |Run { tensor, items }| {
        let item_bytes = dtype_of(*tensor).size_in_bytes();
        items.start * item_bytes..items.end * item_bytes
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use candle_core::Device;

    use super::*;

    /// Runs the rounds of all ranks in chunks of `chunk_words` words, and returns the results of each rank.
    fn run_rounds(mut rounds: Vec<Box<dyn MpiRound>>, chunk_words: usize) -> Vec<Vec<Tensor>> {
        let n_ranks = rounds.len();
        for rank in 0..n_ranks {
            let others = || (0..n_ranks).filter(move |&from| from != rank);
            for from in others() {
                assert_eq!(rounds[from].n_outgoing(rank), rounds[rank].n_incoming(from));
            }
            let most = others().map(|from| rounds[rank].n_incoming(from)).max().unwrap();
            for start in (0..most).step_by(chunk_words) {
                let mut arrived = Vec::new();
                for from in others().filter(|&from| start < rounds[rank].n_incoming(from)) {
                    let range = start..rounds[rank].n_incoming(from).min(start + chunk_words);
                    let mut words = vec![0; range.len()];
                    rounds[from].pack(rank, range.clone(), &mut words).unwrap();
                    arrived.push((from, range, words));
                }
                let chunks: Vec<ReceivedChunk<'_>> = arrived
                    .iter()
                    .map(|(from, range, words)| ReceivedChunk {
                        from: *from,
                        range: range.clone(),
                        words,
                    })
                    .collect();
                rounds[rank].consume(&chunks).unwrap();
            }
        }
        rounds.into_iter().map(|round| round.finish().unwrap()).collect()
    }

    #[test]
    fn runs_begin_at_words() {
        let part = |run_index, in_run: Range<usize>, start: usize| {
            let in_chunk = start..start + in_run.len();
            ByteSpan { run_index, in_run, in_chunk }
        };
        let runs = [3, 0, 20, 8];
        assert_eq!(n_words(runs.into_iter()), 5);
        let spans = |words| spans_in_chunk(runs.into_iter(), &words);
        assert_eq!(spans(0..5), [part(0, 0..3, 0), part(2, 0..20, 8), part(3, 0..8, 32)]);
        assert_eq!(spans(0..1), [part(0, 0..3, 0)]);
        assert_eq!(spans(2..4), [part(2, 8..20, 0)]);
        assert_eq!(spans(5..5), []);
    }

    #[test]
    fn each_rank_gets_its_runs() {
        let list = |rank: u32| {
            let x = Tensor::arange(0_f32, 7., &Device::Cpu).unwrap().affine(1., f64::from(rank));
            [DType::F32, DType::U8, DType::BF16]
                .map(|dtype| x.as_ref().unwrap().to_dtype(dtype).unwrap())
        };
        let run = |tensor, items| Run { tensor, items };
        let by_rank: Arc<[Vec<Run>]> =
            [vec![run(1, 2..5), run(0, 0..7)], vec![run(2, 6..7), run(1, 0..2), run(2, 0..0)]]
                .into();
        let round = |rank: usize| -> Box<dyn MpiRound> {
            let list = list(u32::try_from(rank).unwrap());
            Box::new(SumRound::new(&list, rank, Arc::clone(&by_rank)).unwrap())
        };
        let numbers = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        for chunk_words in 1..6 {
            let results = run_rounds(vec![round(0), round(1)], chunk_words);
            assert_eq!(numbers(&results[0][0]), [5., 7., 9.]);
            assert_eq!(numbers(&results[0][1]), [1., 3., 5., 7., 9., 11., 13.]);
            assert_eq!(numbers(&results[1][0]), [13.]);
            assert_eq!(numbers(&results[1][1]), [1., 3.]);
            assert_eq!(results[1][2].dims(), [0]);
            let types: Vec<DType> = results[0].iter().map(Tensor::dtype).collect();
            assert_eq!(types, [DType::U8, DType::F32]);
        }
    }

    #[test]
    fn unsupported_dtype_is_rejected_before_sending() {
        let x = Tensor::zeros(3, DType::F8E4M3, &Device::Cpu).unwrap();
        let round = SumRound::new(&[x], 0, [Vec::new(), Vec::new()].into()).map(drop);
        let text = round.unwrap_err().to_string();
        assert!(text.starts_with("tensors of type f8e4m3 cannot be reduced"), "{text}");
    }
}
