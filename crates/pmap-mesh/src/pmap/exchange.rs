//! Exchange of results between processes before they are joined, and of fingerprints of results
//! that must be equal.

use std::iter;

use candle_core::{DType, Device, Tensor};
use core_types::Fingerprint;

use crate::{
    error::{Error, Result, ValueError},
    mesh::DeviceMesh,
    spec::{
        ResolvedSpec, Specs,
        join::{Comparison, fingerprint, replicated_axes},
    },
};

/// The exchange of a call's results.
pub(super) struct ResultExchange<'a> {
    pub(super) mesh: &'a DeviceMesh,
    pub(super) specs: &'a Specs,
    /// The resolved `specs` of this process's results; `None` if the specs do not fit. The process
    /// takes part in the exchange even then, so that the others see the mismatch.
    pub(super) resolved: Option<&'a [ResolvedSpec]>,
    /// Whether to skip the comparison of replicated results.
    pub(super) trust: bool,
}

impl ResultExchange<'_> {
    /// Returns the results of all slots, given the results of this process's slots, and the
    /// comparison for replicated results. Every process calls it.
    ///
    /// An unjoined result of a slot is replaced by this process's result if it is replicated, and
    /// otherwise by an empty tensor.
    ///
    /// # Errors
    ///
    /// [`ValueError::OutAxes`] and [`ValueError::OutputCount`], on all processes. If one process
    /// fails, its error there and [`ProcessError::Peer`](crate::ProcessError::Peer) on the others.
    pub(super) fn run(&self, own: &[Vec<Tensor>]) -> Result<(Vec<Vec<Tensor>>, Comparison)> {
        let slots = self.mesh.local_slots().zip(own);
        let lists = slots.map(|(slot, results)| self.encode_results(slot, results)).collect();
        let mut per_slot = Vec::new();
        let mut agreements = Vec::new();
        let mut fingerprints = Vec::new();
        for list in self.mesh.exchange_results(lists)? {
            let (agreement, prints, results) = decode_results(list)?;
            agreements.push(agreement);
            fingerprints.push(prints);
            per_slot.push(results);
        }
        check_counts(&per_slot)?;
        if let Some(slot) = agreements.iter().position(|other| *other != agreements[0]) {
            return Err(ValueError::OutAxes { slot }.into());
        }
        for results in &mut per_slot {
            for (index, own) in own[0].iter().enumerate() {
                if !self.is_joined(index) {
                    results[index] = own.clone();
                }
            }
        }
        if self.trust {
            return Ok((per_slot, Comparison::Trusted));
        }
        Ok((per_slot, Comparison::Fingerprints(fingerprints)))
    }

    /// Encodes a slot's results for the other processes: a tensor of words, followed by the
    /// results. The first word must agree; each of the others is the fingerprint of a result.
    fn encode_results(&self, slot: usize, results: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut words = vec![self.agreement_word()];
        let mut sent = Vec::with_capacity(results.len());
        for (index, result) in results.iter().enumerate() {
            let (print, joined) = self.encode_result(index, slot, result)?;
            words.push(print);
            sent.push(joined);
        }
        let words: Vec<i64> = words.into_iter().map(u64::cast_signed).collect();
        let words = Tensor::new(words, &Device::Cpu).map_err(Error::gather(0))?;
        Ok(iter::once(words).chain(sent).collect())
    }

    /// Returns the fingerprint of a result, or 0 if it is not compared, and the tensor to send for
    /// it.
    fn encode_result(&self, index: usize, slot: usize, result: &Tensor) -> Result<(u64, Tensor)> {
        let topology = self.mesh.topology();
        let replicated = match self.resolved {
            Some(specs) => replicated_axes(&specs[index], topology)?,
            None => 0,
        };
        let is_compared = !self.trust && topology.size(replicated) > 1;
        let print = if is_compared { fingerprint(result) } else { Ok(0) };
        let is_first = topology.groups(replicated).position(slot).rank == 0;
        let sent = if is_first && self.is_joined(index) {
            Ok(result.clone())
        } else {
            Tensor::zeros(0, DType::U8, &Device::Cpu)
        };
        Ok((print.map_err(Error::gather(index))?, sent.map_err(Error::gather(index))?))
    }

    /// Returns a hash that differs if two processes treat their results differently.
    fn agreement_word(&self) -> u64 {
        // Hash the specs both as written and as resolved for each result: equal specs mean
        // different things for trees of different form.
        let text = format!("{:?}, {:?}, trusted: {}", self.specs, self.resolved, self.trust);
        Fingerprint::new().write_bytes(text.as_bytes()).finish()
    }

    /// Returns true if several slots' results are joined into this result.
    fn is_joined(&self, index: usize) -> bool {
        self.resolved.is_some_and(|specs| !specs[index].is_empty())
    }
}

/// Checks that all slots have as many results as the first one.
pub(super) fn check_counts(per_slot: &[Vec<Tensor>]) -> Result<()> {
    let expected = per_slot[0].len();
    match per_slot.iter().position(|results| results.len() != expected) {
        None => Ok(()),
        Some(slot) => {
            let tensors = per_slot[slot].len();
            Err(ValueError::OutputCount { slot, tensors, expected }.into())
        }
    }
}

/// Decodes a slot's [encoded](ResultExchange::encode_results) results: the word that must agree, the
/// fingerprints, and the results.
#[expect(
    clippy::expect_used,
    reason = "every list under `AllgatherPurpose::Results` is from `encode_results`"
)]
fn decode_results(list: Vec<Tensor>) -> Result<(u64, Vec<u64>, Vec<Tensor>)> {
    let mut list = list.into_iter();
    let words = list.next().expect("a list begins with its words");
    let words: Vec<i64> = words.to_vec1().map_err(Error::gather(0))?;
    let mut words = words.into_iter().map(i64::cast_unsigned);
    let agreement = words.next().expect("words begin with the one that must agree");
    Ok((agreement, words.collect(), list.collect()))
}
