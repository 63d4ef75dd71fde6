//! The exchange, between processes, of results that are joined, and of the fingerprints of results
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
    /// The resolved `specs` of this process's results; `None` if the specs do not fit the results.
    /// The process then still takes part in the exchange, so that the other processes see the
    /// mismatch.
    pub(super) resolved: Option<&'a [ResolvedSpec]>,
    /// Whether to skip the comparison of replicated results.
    pub(super) trust: bool,
}

impl ResultExchange<'_> {
    /// Exchanges results with the other processes; `own` are the results of this process's slots.
    /// Returns the results of all slots, and the comparison of replicated results. Every process
    /// makes this call.
    ///
    /// Only the first of several replicas sends a result that is joined; the results of the other
    /// replicas are empty tensors. A result that is not joined is not sent: for all slots, this
    /// process's result is returned.
    ///
    /// # Errors
    ///
    /// On all processes, [`ValueError::OutAxes`] and [`ValueError::OutputCount`]. If one process
    /// fails, that process gets its error, and the others get
    /// [`ProcessError::Peer`](crate::ProcessError::Peer).
    pub(super) fn run(&self, own: &[Vec<Tensor>]) -> Result<(Vec<Vec<Tensor>>, Comparison)> {
        let slots = self.mesh.local_slots().zip(own);
        let lists = slots.map(|(slot, results)| self.encode_results(slot, results)).collect();
        let mut per_slot = Vec::new();
        let mut agreements = Vec::new();
        let mut fingerprints = Vec::new();
        for list in self.mesh.exchange_results(lists)? {
            let (agreement, slot_fingerprints, results) = decode_results(list)?;
            agreements.push(agreement);
            fingerprints.push(slot_fingerprints);
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
    /// results. The first word must be equal for all slots. Each later word is the fingerprint of a
    /// result.
    fn encode_results(&self, slot: usize, results: &[Tensor]) -> Result<Vec<Tensor>> {
        let mut words = vec![self.agreement_word()];
        let mut messages = Vec::with_capacity(results.len());
        for (index, result) in results.iter().enumerate() {
            let (fingerprint, message) = self.encode_result(index, slot, result)?;
            words.push(fingerprint);
            messages.push(message);
        }
        let signed_words: Vec<i64> = words.into_iter().map(u64::cast_signed).collect();
        let word_tensor = Tensor::new(signed_words, &Device::Cpu).map_err(Error::gather(0))?;
        Ok(iter::once(word_tensor).chain(messages).collect())
    }

    /// Returns the fingerprint of a slot's result, or 0 if the result is not compared, and the
    /// tensor to send for the result.
    fn encode_result(&self, index: usize, slot: usize, result: &Tensor) -> Result<(u64, Tensor)> {
        let topology = self.mesh.topology();
        let replicated_set = match self.resolved {
            Some(specs) => replicated_axes(&specs[index], topology)?,
            None => 0,
        };
        let is_compared = !self.trust && topology.size(replicated_set) > 1;
        let fingerprint =
            if is_compared { fingerprint(result).map_err(Error::gather(index))? } else { 0 };
        let is_first = topology.groups(replicated_set).position(slot).rank == 0;
        let message = if is_first && self.is_joined(index) {
            result.clone()
        } else {
            Tensor::zeros(0, DType::U8, &Device::Cpu).map_err(Error::gather(index))?
        };
        Ok((fingerprint, message))
    }

    /// Returns a hash that differs if two processes treat their results differently.
    fn agreement_word(&self) -> u64 {
        // Hash the specs and the resolved specs of each result, because results of different
        // structure resolve the same specs differently.
        let text = format!("{:?}, {:?}, trusted: {}", self.specs, self.resolved, self.trust);
        Fingerprint::new().write_bytes(text.as_bytes()).finish()
    }

    /// Returns true if result number `index` is joined from the results of several slots.
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

/// Decodes a slot's results from [`encode_results`](ResultExchange::encode_results). Returns the
/// word that must be equal for all slots, the fingerprints, and the results.
#[expect(
    clippy::expect_used,
    reason = "every list under `AllgatherPurpose::Results` is from `encode_results`"
)]
fn decode_results(list: Vec<Tensor>) -> Result<(u64, Vec<u64>, Vec<Tensor>)> {
    let mut list = list.into_iter();
    let word_tensor = list.next().expect("a list begins with its words");
    let signed_words: Vec<i64> = word_tensor.to_vec1().map_err(Error::gather(0))?;
    let mut words = signed_words.into_iter().map(i64::cast_unsigned);
    let agreement = words.next().expect("words begin with the one that must agree");
    Ok((agreement, words.collect(), list.collect()))
}
