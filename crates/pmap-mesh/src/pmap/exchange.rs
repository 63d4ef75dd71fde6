//! Exchange of results between processes before they are joined, and of fingerprints of those that
//! must be the same.

use std::iter;

use candle_core::{DType, Device, Tensor};
use core_types::Fingerprint;

use crate::{
    error::{Error, Result, ValueError},
    mesh::DeviceMesh,
    spec::{
        Resolved, Specs,
        join::{Comparison, fingerprint, replicated_axes},
    },
};

/// How the results of a call are exchanged.
pub(super) struct Exchange<'a> {
    pub(super) mesh: &'a DeviceMesh,
    pub(super) specs: &'a Specs,
    /// `specs` for each of this process's results; `None` if they do not fit these, of which the
    /// others must hear all the same.
    pub(super) resolved: Option<&'a [Resolved]>,
    /// Whether nothing is compared.
    pub(super) trust: bool,
}

impl Exchange<'_> {
    /// The results of all slots, given those of this process's slots, and how to compare those that
    /// must be the same. Every process calls it.
    ///
    /// A slot whose result is not joined has an empty tensor in its place, or this process's own
    /// result where all must be the same.
    ///
    /// # Errors
    ///
    /// [`ValueError::OutAxes`] and [`ValueError::OutputCount`], on all processes alike; if one of
    /// them fails, its error there and [`ProcessError::Peer`](crate::ProcessError::Peer) on the
    /// others.
    pub(super) fn run(&self, own: &[Vec<Tensor>]) -> Result<(Vec<Vec<Tensor>>, Comparison)> {
        let slots = self.mesh.local_slots().zip(own);
        let told = slots.map(|(slot, results)| self.told(slot, results)).collect();
        let mut of_slots = Vec::new();
        let mut agreements = Vec::new();
        let mut prints = Vec::new();
        for list in self.mesh.exchange_results(told)? {
            let (agreement, of_slot, results) = decode_results(list)?;
            agreements.push(agreement);
            prints.push(of_slot);
            of_slots.push(results);
        }
        check_counts(&of_slots)?;
        if let Some(slot) = agreements.iter().position(|other| *other != agreements[0]) {
            return Err(ValueError::OutAxes { slot }.into());
        }
        for results in &mut of_slots {
            let unjoined = results.iter_mut().zip(&own[0]).enumerate();
            for (_, (result, own)) in unjoined.filter(|(index, _)| !self.is_joined(*index)) {
                *result = own.clone();
            }
        }
        let comparison =
            if self.trust { Comparison::Trusted } else { Comparison::Fingerprints(prints) };
        Ok((of_slots, comparison))
    }

    /// What the others are told of a slot's results: a tensor of words, first one that must agree
    /// and then one for each result, and the results themselves.
    fn told(&self, slot: usize, results: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut words = vec![self.agreement()];
        let mut sent = Vec::with_capacity(results.len());
        for (index, result) in results.iter().enumerate() {
            let (print, joined) = self.one_told(index, slot, result)?;
            words.push(print);
            sent.push(joined);
        }
        let words: Vec<i64> = words.into_iter().map(u64::cast_signed).collect();
        let words = Tensor::new(words, &Device::Cpu).map_err(Error::gather(0))?;
        Ok(iter::once(words).chain(sent).collect())
    }

    /// The fingerprint of a result, if it is compared, and what is sent of it.
    fn one_told(&self, index: usize, slot: usize, result: &Tensor) -> Result<(u64, Tensor)> {
        let topology = self.mesh.topology();
        let replicated = match self.resolved {
            Some(specs) => replicated_axes(&specs[index], topology)?,
            None => 0,
        };
        let is_compared = !self.trust && topology.size(replicated) > 1;
        let print = if is_compared { fingerprint(result) } else { Ok(0) };
        let is_first = topology.groups(replicated).place(slot).rank == 0;
        let sent = if is_first && self.is_joined(index) {
            Ok(result.clone())
        } else {
            Tensor::zeros(0, DType::U8, &Device::Cpu)
        };
        Ok((print.map_err(Error::gather(index))?, sent.map_err(Error::gather(index))?))
    }

    /// A number that differs if two processes treat their results in different ways.
    fn agreement(&self) -> u64 {
        // The specs as they are written, and for each result: the same ones mean another thing for
        // trees of another form.
        let text = format!("{:?}, {:?}, trusted: {}", self.specs, self.resolved, self.trust);
        Fingerprint::new().write_bytes(text.as_bytes()).finish()
    }

    /// Whether a result is put together of what several slots have.
    fn is_joined(&self, index: usize) -> bool {
        self.resolved.is_some_and(|specs| !specs[index].is_empty())
    }
}

/// Checks that all slots have as many results as the first one.
pub(super) fn check_counts(of_slots: &[Vec<Tensor>]) -> Result<()> {
    let expected = of_slots[0].len();
    match of_slots.iter().position(|results| results.len() != expected) {
        None => Ok(()),
        Some(slot) => {
            let tensors = of_slots[slot].len();
            Err(ValueError::OutputCount { slot, tensors, expected }.into())
        }
    }
}

/// What a slot has been [`told`](Exchange::told) of another one: the word that must agree, a word
/// for each result, and the results.
#[expect(clippy::expect_used, reason = "only lists of `told` come under the name of results")]
fn decode_results(list: Vec<Tensor>) -> Result<(u64, Vec<u64>, Vec<Tensor>)> {
    let mut list = list.into_iter();
    let words = list.next().expect("a list begins with its words");
    let words: Vec<i64> = words.to_vec1().map_err(Error::gather(0))?;
    let mut words = words.into_iter().map(i64::cast_unsigned);
    let agreement = words.next().expect("words begin with the one that must agree");
    Ok((agreement, words.collect(), list.collect()))
}
