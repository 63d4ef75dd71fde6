//! What a collective of lists sends to each rank, and makes of what arrives, a piece at a time.

mod gather;
mod reduce;

use std::ops::Range;

use bytemuck::cast_slice_mut;
use candle_core::{DType, Result, Tensor};

pub(super) use self::{gather::Gathering, reduce::Reducing};
use super::bytes::with_part;
use crate::engine::layout::Run;

/// One round of messages, in which each rank has words for each other one: items of runs, each run
/// from a word of its own on, so that items of any type may lie there.
///
/// What can be wrong is refused when a job is made: an error of its methods is one of this crate.
pub(super) trait Job: Send {
    /// How many words this rank sends to another one.
    fn n_outgoing(&self, to: usize) -> usize;

    /// How many words another rank sends to this one.
    fn n_incoming(&self, from: usize) -> usize;

    /// Copies words for a rank.
    fn pack(&self, to: usize, words: Range<usize>, into: &mut [u64]) -> Result<()>;

    /// Takes the next words of every rank that has more for this one, by rank.
    fn take(&mut self, pieces: &[Piece<'_>]) -> Result<()>;

    /// What follows when everything has been taken.
    fn finish(self: Box<Self>) -> Result<Next>;
}

/// Words that have come from a rank.
pub(super) struct Piece<'a> {
    pub(super) from: usize,
    /// Which of all that come from it.
    pub(super) words: Range<usize>,
    pub(super) items: &'a [u64],
}

/// What follows on a round.
pub(super) enum Next {
    Round(Box<dyn Job>),
    Results(Vec<Tensor>),
}

/// A part of a run that lies in a piece.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    /// Which of the runs.
    n_th: usize,
    /// Which bytes of the run.
    bytes: Range<usize>,
    /// Which bytes of the piece.
    place: Range<usize>,
}

/// What lies in these words of runs that have so many bytes each.
fn parts(n_bytes: impl Iterator<Item = usize>, words: &Range<usize>) -> Vec<Part> {
    let piece = words.start * size_of::<u64>()..words.end * size_of::<u64>();
    let mut run_start = 0;
    let mut parts = Vec::new();
    for (n_th, n_bytes) in n_bytes.enumerate() {
        let start = piece.start.max(run_start);
        let end = piece.end.min(run_start + n_bytes);
        if start < end {
            let bytes = start - run_start..end - run_start;
            parts.push(Part { n_th, bytes, place: start - piece.start..end - piece.start });
        }
        run_start += n_bytes.next_multiple_of(size_of::<u64>());
    }
    parts
}

/// How many words runs that have so many bytes each take.
fn n_words(n_bytes: impl Iterator<Item = usize>) -> usize {
    n_bytes.map(|n_bytes| n_bytes.div_ceil(size_of::<u64>())).sum()
}

/// Copies parts of runs into a piece; `run` says by the number of a run of which tensor it is, and
/// with which of its bytes it begins.
fn pack<'a>(
    parts: Vec<Part>,
    run: impl Fn(usize) -> (&'a Tensor, usize),
    into: &mut [u64],
) -> Result<()> {
    let into: &mut [u8] = cast_slice_mut(into);
    for Part { n_th, bytes, place } in parts {
        let (x, start) = run(n_th);
        with_part(x, start + bytes.start..start + bytes.end, |bytes| {
            into[place].copy_from_slice(bytes);
            Ok(())
        })?;
    }
    Ok(())
}

/// How many bytes each run of some tensors has, and with which byte it begins.
fn bytes_of<'a>(
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
    use crate::reduce::Reduction;

    /// What all ranks, of which there are several, get if everything arrives, in pieces of so many
    /// words.
    fn exchanged(mut jobs: Vec<Box<dyn Job>>, piece_words: usize) -> Vec<Vec<Tensor>> {
        let n_ranks = jobs.len();
        for rank in 0..n_ranks {
            let others = || (0..n_ranks).filter(move |&from| from != rank);
            for from in others() {
                assert_eq!(jobs[from].n_outgoing(rank), jobs[rank].n_incoming(from));
            }
            let most = others().map(|from| jobs[rank].n_incoming(from)).max().unwrap();
            for start in (0..most).step_by(piece_words) {
                let mut arrived = Vec::new();
                for from in others().filter(|&from| start < jobs[rank].n_incoming(from)) {
                    let words = start..jobs[rank].n_incoming(from).min(start + piece_words);
                    let mut items = vec![0; words.len()];
                    jobs[from].pack(rank, words.clone(), &mut items).unwrap();
                    arrived.push((from, words, items));
                }
                let pieces: Vec<Piece<'_>> = arrived
                    .iter()
                    .map(|(from, words, items)| Piece { from: *from, words: words.clone(), items })
                    .collect();
                jobs[rank].take(&pieces).unwrap();
            }
        }
        let mut results = Vec::new();
        let mut rounds = Vec::new();
        for job in jobs {
            match job.finish().unwrap() {
                Next::Results(of_rank) => results.push(of_rank),
                Next::Round(job) => rounds.push(job),
            }
        }
        if rounds.is_empty() { results } else { exchanged(rounds, piece_words) }
    }

    #[test]
    fn parts_lie_where_their_runs_begin_with_a_word_each() {
        let part = |n_th, bytes: Range<usize>, start: usize| {
            let place = start..start + bytes.len();
            Part { n_th, bytes, place }
        };
        let runs = [3, 0, 20, 8];
        assert_eq!(n_words(runs.into_iter()), 5);
        let of = |words| parts(runs.into_iter(), &words);
        assert_eq!(of(0..5), [part(0, 0..3, 0), part(2, 0..20, 8), part(3, 0..8, 32)]);
        assert_eq!(of(0..1), [part(0, 0..3, 0)]);
        assert_eq!(of(2..4), [part(2, 8..20, 0)]);
        assert_eq!(of(5..5), []);
    }

    #[test]
    fn each_rank_gets_its_runs_of_every_type() {
        let list = |rank: u32| {
            let x = Tensor::arange(0_f32, 7., &Device::Cpu).unwrap().affine(1., f64::from(rank));
            [DType::F32, DType::U8, DType::BF16]
                .map(|dtype| x.as_ref().unwrap().to_dtype(dtype).unwrap())
        };
        let run = |tensor, items| Run { tensor, items };
        let by_rank: Arc<[Vec<Run>]> =
            [vec![run(1, 2..5), run(0, 0..7)], vec![run(2, 6..7), run(1, 0..2), run(2, 0..0)]]
                .into();
        let job = |rank: usize| -> Box<dyn Job> {
            let list = list(u32::try_from(rank).unwrap());
            Box::new(Reducing::of_runs(&list, rank, Arc::clone(&by_rank), Reduction::Sum).unwrap())
        };
        let numbers = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        for piece_words in 1..6 {
            let results = exchanged(vec![job(0), job(1)], piece_words);
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
    fn all_ranks_get_everything_that_is_for_all() {
        let job = |rank: usize| -> Box<dyn Job> {
            let x = Tensor::full(u32::try_from(rank).unwrap(), (3, 3), &Device::Cpu).unwrap();
            Box::new(Reducing::for_all(&[x], rank, 4, Reduction::Max).unwrap())
        };
        for results in exchanged((0..4).map(job).collect(), 1) {
            assert_eq!(results[0].to_vec2::<u32>().unwrap(), [[3; 3]; 3]);
        }
    }

    #[test]
    fn what_has_no_sum_is_refused_before_it_is_sent() {
        let x = Tensor::zeros(3, DType::F8E4M3, &Device::Cpu).unwrap();
        let refused = Reducing::for_all(&[x], 0, 2, Reduction::Sum).map(drop);
        let text = refused.unwrap_err().to_string();
        assert!(text.starts_with("tensors of type f8e4m3 cannot be reduced"), "{text}");
    }
}
