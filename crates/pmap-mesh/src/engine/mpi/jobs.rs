//! What a collective under way sends to each rank, and makes of what arrives.

use std::{collections::BTreeMap, ops::Range, sync::Arc};

use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{DType, Device, Result, Shape, Tensor};

use super::bytes::{Buffer, buffer, with_bytes};
use crate::{
    engine::layout::{Run, RunLayout},
    mesh::place::{on_host, placed},
    reduce::{self, Reduction, parts::balanced},
};

/// Runs of items of each rank, each run on a word of its own, so that items of any type may lie
/// there.
type Words = Vec<u64>;

/// One round of messages, which all go to and come from every other rank.
pub(super) enum Job {
    Gather(Gathering),
    Reduce(Reducing),
}

pub(super) struct Gathering {
    /// This rank's runs.
    own: Vec<Tensor>,
    tensors: Vec<(Shape, DType, Device)>,
    by_rank: Arc<[Vec<Run>]>,
    are_leaves: bool,
}

pub(super) struct Reducing {
    list: Vec<Tensor>,
    devices: Vec<Device>,
    by_rank: Arc<[Vec<Run>]>,
    reduction: Reduction,
    /// Whether the reductions are then gathered by all.
    for_all: bool,
}

/// What follows on a round.
pub(super) enum Next {
    Round(Job),
    Results(Vec<Tensor>),
}

impl Job {
    /// The one round of a gathering, in which rank `own_rank` has `own` runs.
    pub(super) fn gather(
        own: &[Tensor],
        own_rank: usize,
        layout: &RunLayout,
        device: &Device,
    ) -> Result<Self> {
        let tensors = layout.tensors().iter();
        let by_rank = layout.gathered_by_rank();
        Ok(Self::Gather(Gathering {
            own: own[..by_rank[own_rank].len()].iter().map(on_host).collect::<Result<_>>()?,
            tensors: tensors
                .map(|(shape, dtype)| (shape.clone(), *dtype, device.clone()))
                .collect(),
            by_rank: Arc::clone(by_rank),
            are_leaves: true,
        }))
    }

    /// The one round of a reduction of which each rank gets its runs.
    pub(super) fn reduce_runs(
        list: &[Tensor],
        by_rank: Arc<[Vec<Run>]>,
        reduction: Reduction,
    ) -> Result<Self> {
        Self::reduce(list, by_rank, reduction, false)
    }

    /// The first of two rounds of a reduction of which all get everything: each rank makes a part.
    pub(super) fn reduce_all(
        list: &[Tensor],
        n_ranks: usize,
        reduction: Reduction,
    ) -> Result<Self> {
        let share = |rank| {
            let items = list.iter().map(|x| balanced(x.elem_count(), rank, n_ranks)).enumerate();
            items.map(|(tensor, items)| Run { tensor, items }).collect()
        };
        Self::reduce(list, (0..n_ranks).map(share).collect(), reduction, true)
    }

    fn reduce(
        list: &[Tensor],
        by_rank: Arc<[Vec<Run>]>,
        reduction: Reduction,
        for_all: bool,
    ) -> Result<Self> {
        let devices = list.iter().map(|x| x.device().clone()).collect();
        let list = list.iter().map(on_host).collect::<Result<_>>()?;
        Ok(Self::Reduce(Reducing { list, devices, by_rank, reduction, for_all }))
    }

    /// What is sent to each of these ranks.
    pub(super) fn outgoing(
        &self,
        ranks: impl Iterator<Item = usize>,
    ) -> Result<Vec<(usize, Words)>> {
        match self {
            Self::Gather(Gathering { own, .. }) => {
                let mut words = Words::new();
                for x in own {
                    append(&mut words, x, 0..x.elem_count())?;
                }
                Ok(ranks.map(|to| (to, words.clone())).collect())
            }
            Self::Reduce(job) => ranks.map(|to| Ok((to, job.packed(to)?))).collect(),
        }
    }

    /// How many words come from a rank.
    pub(super) fn incoming(&self, from: usize, own_rank: usize) -> usize {
        match self {
            Self::Gather(job) => n_words(&job.by_rank[from], |tensor| job.tensors[tensor].1),
            Self::Reduce(job) => n_words(&job.by_rank[own_rank], |tensor| job.list[tensor].dtype()),
        }
    }

    /// Makes what follows of what has come from the other ranks.
    pub(super) fn finish(self, own_rank: usize, arrived: &BTreeMap<usize, Words>) -> Result<Next> {
        match self {
            Self::Gather(job) => job.finish(own_rank, arrived).map(Next::Results),
            Self::Reduce(job) => job.finish(own_rank, arrived),
        }
    }
}

impl Gathering {
    fn finish(self, own_rank: usize, arrived: &BTreeMap<usize, Words>) -> Result<Vec<Tensor>> {
        let mut wholes: Vec<Box<dyn Buffer>> = self
            .tensors
            .iter()
            .map(|(shape, dtype, _)| buffer(*dtype, shape.elem_count()))
            .collect::<Result<_>>()?;
        for (rank, runs) in self.by_rank.iter().enumerate() {
            let mut start = 0;
            for (n, Run { tensor, items }) in runs.iter().enumerate() {
                let item_bytes = self.tensors[*tensor].1.size_in_bytes();
                let place = items.start * item_bytes..items.end * item_bytes;
                let into = &mut wholes[*tensor].bytes_mut()[place];
                if rank == own_rank {
                    with_bytes(&self.own[n], |bytes| {
                        into.copy_from_slice(bytes);
                        Ok(())
                    })?;
                } else {
                    into.copy_from_slice(&cast_slice(&arrived[&rank][start..])[..into.len()]);
                    start += into.len().div_ceil(size_of::<u64>());
                }
            }
        }
        let whole = |(whole, (shape, _, device)): (Box<dyn Buffer>, &(Shape, DType, Device))| {
            if self.are_leaves {
                placed(whole.leaf(shape.dims())?, device)
            } else {
                whole.tensor(shape.dims())?.to_device(device)
            }
        };
        wholes.into_iter().zip(&self.tensors).map(whole).collect()
    }
}

impl Reducing {
    /// What is sent to a rank: its runs of this rank's list.
    fn packed(&self, to: usize) -> Result<Words> {
        let mut words = Words::new();
        for Run { tensor, items } in &self.by_rank[to] {
            append(&mut words, &self.list[*tensor], items.clone())?;
        }
        Ok(words)
    }

    fn finish(self, own_rank: usize, arrived: &BTreeMap<usize, Words>) -> Result<Next> {
        let own = self.packed(own_rank)?;
        let of_rank = |rank: usize| if rank == own_rank { &own } else { &arrived[&rank] };
        let mut sums = Vec::new();
        let mut start = 0;
        for Run { tensor, items } in &self.by_rank[own_rank] {
            let dtype = self.list[*tensor].dtype();
            let mut sum = buffer(dtype, items.len())?;
            let n_bytes = sum.bytes_mut().len();
            if n_bytes > 0 {
                let ranks = 0..self.by_rank.len();
                let summands: Vec<&[u8]> =
                    ranks.map(|rank| &cast_slice(&of_rank(rank)[start..])[..n_bytes]).collect();
                reduce::bytes(dtype, &summands, self.reduction, sum.bytes_mut())?;
            }
            start += n_bytes.div_ceil(size_of::<u64>());
            sums.push(sum.tensor(&[items.len()])?);
        }
        if self.for_all { Ok(self.spread(sums)) } else { self.own_results(own_rank, &sums) }
    }

    /// The second round, in which all get what each has reduced.
    fn spread(self, own: Vec<Tensor>) -> Next {
        let tensor = |(x, device): (&Tensor, Device)| (x.shape().clone(), x.dtype(), device);
        let tensors = self.list.iter().zip(self.devices).map(tensor).collect();
        Next::Round(Job::Gather(Gathering {
            own,
            tensors,
            by_rank: self.by_rank,
            are_leaves: false,
        }))
    }

    fn own_results(self, own_rank: usize, sums: &[Tensor]) -> Result<Next> {
        let devices = self.by_rank[own_rank].iter().map(|run| &self.devices[run.tensor]);
        let results = sums.iter().zip(devices).map(|(sum, device)| sum.to_device(device));
        Ok(Next::Results(results.collect::<Result<_>>()?))
    }
}

/// Adds a run of a tensor's items, from the next whole word on.
fn append(words: &mut Words, x: &Tensor, items: Range<usize>) -> Result<()> {
    let item_bytes = x.dtype().size_in_bytes();
    let n_bytes = items.len() * item_bytes;
    let start = words.len();
    words.resize(start + n_bytes.div_ceil(size_of::<u64>()), 0);
    let into = &mut cast_slice_mut(&mut words[start..])[..n_bytes];
    with_bytes(x, |bytes| {
        into.copy_from_slice(&bytes[items.start * item_bytes..items.end * item_bytes]);
        Ok(())
    })
}

/// How many words [`append`] makes of some runs.
fn n_words(runs: &[Run], dtype_of: impl Fn(usize) -> DType) -> usize {
    let words = |run: &Run| {
        (run.items.len() * dtype_of(run.tensor).size_in_bytes()).div_ceil(size_of::<u64>())
    };
    runs.iter().map(words).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What all ranks get if everything arrives.
    fn exchanged(jobs: Vec<Job>) -> Vec<Vec<Tensor>> {
        let n_ranks = jobs.len();
        let mut arrived = vec![BTreeMap::new(); n_ranks];
        for (from, job) in jobs.iter().enumerate() {
            let others = (0..n_ranks).filter(|&to| to != from);
            for (to, words) in job.outgoing(others).unwrap() {
                assert_eq!(words.len(), jobs[to].incoming(from, to));
                arrived[to].insert(from, words);
            }
        }
        let finished = jobs.into_iter().zip(arrived).enumerate();
        let next: Vec<Next> =
            finished.map(|(rank, (job, arrived))| job.finish(rank, &arrived).unwrap()).collect();
        let mut results = Vec::new();
        let mut rounds = Vec::new();
        for next in next {
            match next {
                Next::Results(of_rank) => results.push(of_rank),
                Next::Round(job) => rounds.push(job),
            }
        }
        if rounds.is_empty() { results } else { exchanged(rounds) }
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
        let job =
            |rank| Job::reduce_runs(&list(rank), Arc::clone(&by_rank), Reduction::Sum).unwrap();
        let results = exchanged(vec![job(0), job(1)]);
        let numbers = |x: &Tensor| x.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(numbers(&results[0][0]), [5., 7., 9.]);
        assert_eq!(numbers(&results[0][1]), [1., 3., 5., 7., 9., 11., 13.]);
        assert_eq!(numbers(&results[1][0]), [13.]);
        assert_eq!(numbers(&results[1][1]), [1., 3.]);
        assert_eq!(results[1][2].dims(), [0]);
        let types: Vec<DType> = results[0].iter().map(Tensor::dtype).collect();
        assert_eq!(types, [DType::U8, DType::F32]);
    }

    #[test]
    fn all_ranks_get_everything_that_is_for_all() {
        let job = |rank: u32| {
            let x = Tensor::full(rank, (3, 3), &Device::Cpu).unwrap();
            Job::reduce_all(&[x], 4, Reduction::Max).unwrap()
        };
        for results in exchanged((0..4).map(job).collect()) {
            assert_eq!(results[0].to_vec2::<u32>().unwrap(), [[3; 3]; 3]);
        }
    }
}
