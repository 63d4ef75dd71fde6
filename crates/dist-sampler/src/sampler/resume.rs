//! States of samplers: saving, resuming, and moving to another world.

use std::{fmt::Debug, slice};

use core_types::Placement;

use super::DistributedSampler;
use crate::{
    error::{Error, Result},
    order::PhaseWeights,
    partition::ShareRule,
    reshard::UnreadPositions,
    state::{SamplerState, WorldStage},
};

impl DistributedSampler {
    /// Returns the state after this rank, and every other rank, has read `read` more indices.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let (me, config) = (Placement::new(2, 4)?, SamplerConfig::default());
    /// let sampler = DistributedSampler::new(1_000_000, me, config)?;
    /// let state = sampler.state(1000); // save it with the checkpoint
    ///
    /// let mut resumed = DistributedSampler::new(1_000_000, me, config)?;
    /// resumed.resume(&state)?;
    /// assert!(resumed.iter().take(9).eq(sampler.iter().skip(1000).take(9)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn state(&self, read: u64) -> SamplerState {
        SamplerState {
            format_version: SamplerState::VERSION,
            order: self.config.order,
            len: self.len,
            fingerprint: self.samples.fingerprint(),
            phases: self.samples.phases(),
            seed: self.config.seed,
            epoch: self.epoch,
            stages: self.earlier.iter().cloned().chain([self.stage(read)]).collect(),
        }
    }

    /// Returns the stage of this world after every rank has read `read` more indices.
    fn stage(&self, read: u64) -> WorldStage {
        WorldStage {
            world_size: self.shares.world_size(),
            rule: self.shares.rule().clone(),
            consumed: self.consumed.saturating_add(read),
        }
    }

    /// Moves to the position of another sampler within an epoch, of any rank of any world.
    ///
    /// If that world had the same size, partition and tail, every rank resumes exactly at its
    /// position. Otherwise the samples that were not read, dropped ones included, are assigned
    /// anew: over all ranks, no sample is lost or read again (except for this sampler's tail).
    ///
    /// # Complexity
    ///
    /// O(worlds that have read the epoch), independent of their sizes, and O(ranks) for each with
    /// rank weights, plus the generation of a cached order. Reading an index takes O(worlds) more,
    /// and O(log ranks) for each with rank weights.
    ///
    /// # Errors
    ///
    /// - [`Error::StateMismatch`] if format version, data set, order or seed differ from the state, or the weights
    ///   of a mixture before its position. Weights that the state alone has there are taken from it,
    ///   so a job whose weights have changed resumes. Later weights and the end may differ.
    /// - [`Error::StateConsumed`], [`Error::RankWeights`] or [`Error::InvalidWeights`] if the state
    ///   contradicts itself.
    /// - [`Error::TooMany`] above 1,024 worlds.
    ///
    /// On an error the sampler is unchanged.
    pub fn resume(&mut self, state: &SamplerState) -> Result<()> {
        self.check(state)?;
        let (last, earlier) = state.last_and_earlier();
        let mut unread = UnreadPositions::from(0..state.len);
        for stage in earlier {
            unread = unread_after(stage, unread)?;
        }
        let rest = unread_after(last, unread.clone())?;
        let position = rest.read_end(state.len);
        let missing = self.missing_phases(&state.phases, position);
        if missing.is_empty() {
            self.check_phases(&state.phases, position)?;
        } else {
            let mut reweighted = self.clone();
            for PhaseWeights { from, weights } in &missing {
                reweighted.samples.set_weights_from(*from, weights)?;
            }
            reweighted.check_phases(&state.phases, position)?;
            self.samples = reweighted.samples;
        }

        self.reorder(state.epoch);
        self.samples.set_len(state.len);
        self.len = self.samples.len_or(state.len);
        if self.len == state.len && effective(&self.samples.phases()).eq(effective(&state.phases)) {
            self.continue_after(earlier, last, unread, rest);
        } else {
            // The weights behind the position have changed, and with them the length.
            self.restart_at(position);
        }
        Ok(())
    }

    /// Sets the weights of a mixture for all positions from `position` on, counted over all ranks.
    ///
    /// Nothing before `position` changes, no sample is lost or repeated, and every part continues
    /// where it is. The weights apply in every epoch. A resumed sampler keeps the weights that its state
    /// has for earlier positions. Later weights that were set before are replaced, so set them in
    /// ascending order.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidWeights`] if the sampler is not a mixture, if ranks have read beyond `position`, if
    /// the numbers of weights and parts differ, if all weights are 0, or if their cycle is too long.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, MixtureEnd, MixturePart, SamplerConfig};
    /// let parts = [MixturePart::new(1000, 3), MixturePart::new(1000, 1)];
    /// let (me, end) = (Placement::SINGLE, MixtureEnd::Repeat { len: 1000 });
    /// let mixture = DistributedSampler::mixture(&parts, end, me, SamplerConfig::default())?
    ///     .with_weights_from(400, &[0, 1])?;
    /// let n_first = mixture.iter().filter(|&index| index < 1000).count();
    /// assert_eq!(n_first, 300);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_weights_from(mut self, position: u64, weights: &[u64]) -> Result<Self> {
        let read = self.rest().read_end(self.len);
        if position < read {
            let reason = format!(
                "mixture weights cannot change at position {position}, {read} positions are read"
            );
            return Err(Error::weights(reason));
        }
        self.samples.set_weights_from(position, weights)?;
        self.len = self.samples.len_or(self.len);
        self.restart_at(read);
        Ok(self)
    }

    /// Returns the sampler of another rank, of the same or another world, at the same position of
    /// the same order.
    ///
    /// In the same world the rank has read as many indices as this rank. Another world reads the
    /// samples that this world has not read, as after [`resume`](Self::resume).
    ///
    /// # Errors
    ///
    /// [`Error::RankWeights`] if the sampler has rank weights and the number of ranks changes.
    ///
    /// # Examples
    ///
    /// ```
    /// # use core_types::Placement;
    /// # use dist_sampler::{DistributedSampler, SamplerConfig};
    /// let (me, config) = (Placement::new(1, 4)?, SamplerConfig::default());
    /// let sampler = DistributedSampler::new(1000, me, config)?;
    /// let all_ranks = sampler.clone().with_placement(Placement::SINGLE)?;
    /// assert!(sampler.iter().eq(all_ranks.iter().skip(250).take(250)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_placement(mut self, placement: Placement) -> Result<Self> {
        let (last, rest) = (self.stage(0), self.rest());
        let (earlier, unread) = (self.earlier.clone(), self.unread.clone());
        self.shares =
            ShareRule::new(unread.len(), placement.world_size(), self.shares.rule().clone())?;
        self.placement = placement;
        self.continue_after(&earlier, &last, unread, rest);
        Ok(self)
    }

    /// Moves to the position behind `last`, the current stage of a state, which began with `unread`
    /// and leaves `rest`.
    fn continue_after(
        &mut self,
        earlier: &[WorldStage],
        last: &WorldStage,
        unread: UnreadPositions,
        rest: UnreadPositions,
    ) {
        let is_same_world =
            last.world_size == self.shares.world_size() && last.rule == *self.shares.rule();
        if is_same_world || last.consumed == 0 {
            self.move_to(earlier.to_vec(), unread, last.consumed);
        } else if rest.is_suffix(self.len) {
            self.restart_at(rest.read_end(self.len));
        } else {
            let stages = [earlier, slice::from_ref(last)].concat();
            self.move_to(stages, rest, 0);
        }
    }

    /// Moves to a position of the order before which all positions are read.
    fn restart_at(&mut self, position: u64) {
        let stage = (position > 0).then(|| WorldStage::prefix(position));
        self.move_to(Vec::from_iter(stage), UnreadPositions::from(position..self.len), 0);
    }

    /// Returns the positions that all ranks together have not read.
    fn rest(&self) -> UnreadPositions {
        self.unread.clone().select(self.shares.unread_after(self.consumed))
    }

    /// Checks that a state belongs to this sampler.
    fn check(&self, state: &SamplerState) -> Result<()> {
        let own_state = self.state(0);
        check_equal("format version", &state.format_version, &own_state.format_version)?;
        let (count, max) = (state.stages.len() as u64, SamplerState::MAX_STAGES as u64);
        if count > max {
            return Err(Error::TooMany { count, what: "worlds in one epoch", max });
        }
        check_equal("order", &state.order, &own_state.order)?;
        if !self.samples.accepts_len(state.len, self.len) {
            check_equal("data set length", &state.len, &own_state.len)?;
        }
        check_equal(
            "weights, classes, shards or parts with fingerprint",
            &state.fingerprint,
            &own_state.fingerprint,
        )?;
        check_equal("seed", &state.seed.as_u64(), &own_state.seed.as_u64())
    }

    /// Returns the phases of a state up to `position` that follow all phases of this sampler. A phase at
    /// the position is that of weights which have just changed.
    fn missing_phases(&self, phases: &[PhaseWeights], position: u64) -> Vec<PhaseWeights> {
        let own_phases = self.samples.phases();
        if !phases.starts_with(&own_phases) {
            return Vec::new();
        }
        let missing = phases[own_phases.len()..].iter();
        missing.filter(|phase| phase.from <= position).cloned().collect()
    }

    /// Checks that a mixture has the same weights before `position`, the end of the read samples.
    fn check_phases(&self, phases: &[PhaseWeights], position: u64) -> Result<()> {
        let own_phases = self.samples.phases();
        let read_phases = |phases: &[PhaseWeights]| -> Vec<PhaseWeights> {
            effective(phases).filter(|phase| phase.from < position).cloned().collect()
        };
        check_equal(
            "weights before its position",
            &read_phases(phases),
            &read_phases(&own_phases),
        )?;
        let len = self.samples.len_or(position);
        if own_phases.is_empty() || position <= len {
            return Ok(());
        }
        Err(Error::StateConsumed { consumed: position, len })
    }
}

/// Returns the positions of `unread` that remain after the world of `stage`.
fn unread_after(stage: &WorldStage, unread: UnreadPositions) -> Result<UnreadPositions> {
    let len = unread.len();
    if stage.consumed > len {
        return Err(Error::StateConsumed { consumed: stage.consumed, len });
    }
    let shares = ShareRule::new(len, stage.world_size, stage.rule.clone())?;
    Ok(unread.select(shares.unread_after(stage.consumed)))
}

/// Returns the phases that have a position.
fn effective(phases: &[PhaseWeights]) -> impl Iterator<Item = &PhaseWeights> {
    let is_replaced = |n: usize| phases.get(n + 1).is_some_and(|next| next.from == phases[n].from);
    (0..phases.len()).filter(move |&n| !is_replaced(n)).map(|n| &phases[n])
}

fn check_equal<T: PartialEq + Debug>(what: &'static str, state: &T, sampler: &T) -> Result<()> {
    if state == sampler {
        return Ok(());
    }
    Err(Error::StateMismatch { what, state: format!("{state:?}"), sampler: format!("{sampler:?}") })
}
