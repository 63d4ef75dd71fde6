//! The engine of many processes: each is one slot, and they talk through MPI.
//!
//! Everything goes from process to process with nonblocking messages, nothing through MPI's
//! reductions: their order of summation depends on the number of ranks, the size and the library,
//! and they know no halves.

mod bytes;
mod session;

use std::{
    collections::BTreeMap,
    fmt, mem,
    ops::Range,
    slice,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{DType, Device, Result, Tensor, bail};
use ferrompi::{Communicator, Request};

pub(crate) use self::session::Session;
use self::{
    bytes::{buffer, with_all_bytes, with_bytes},
    session::end,
};
use crate::{
    engine::{
        Engine, Site, on_host,
        processes::{self, Entered, Pending, TEXT_BYTES, agreement, description, disagreement},
    },
    error::Error,
    mesh::{axes::AxisSet, topology::Topology},
    reduce::{self, Reduction, parts::balanced},
    sync::lock,
};

/// Up to how many bytes are sent along with the envelope, and reduced by every member by itself.
const SMALL_BYTES: usize = 16 << 10;
/// What of them goes into the first message: with its head less than the 4 KB that Open MPI sends
/// without asking.
const INLINE_BYTES: usize = 3584;
/// Words of an envelope before its contents.
const HEAD_WORDS: usize = 4;
const HEAD_BYTES: usize = HEAD_WORDS * size_of::<u64>();
/// One member's place among the envelopes that arrive.
const SLOT_BYTES: usize = HEAD_BYTES + SMALL_BYTES;
/// How much of a sum each member makes at a time: what arrives is added up before it leaves the
/// cache.
const PART_BYTES: usize = 256 << 10;
/// The longest single message: below version 4, MPI counts in 32 bits.
const MESSAGE_BYTES: usize = 1 << 30;
/// How often a wait looks for messages before it looks at the clock and gives way.
const TRIES: u32 = 64;
/// Each set of axes longer than 1 has a communicator of its own, and ferrompi holds 256.
const MAX_AXES: usize = 6;

/// Nobody, as the sender in a head.
const NOBODY: u64 = u64::MAX;

/// What a message is; messages of one kind between two processes arrive in order.
#[derive(Clone, Copy)]
enum Kind {
    Envelope = 1,
    Rest,
    Data,
    Text,
}

/// One slot's access to the others.
#[derive(Clone, Debug)]
pub(crate) struct Mpi(Arc<Inner>);

struct Inner {
    topology: Arc<Topology>,
    slot: usize,
    deadline: Duration,
    /// The group of this slot along each set of axes of which it has others.
    groups: BTreeMap<AxisSet, Communicator>,
    /// MPI takes one call at a time.
    pending: Pending,
    scratch: Mutex<Scratch>,
    /// Dropped last.
    session: Arc<Session>,
}

/// Memory that is kept from call to call; in words, so that any items may lie in it.
#[derive(Default)]
struct Scratch {
    envelopes: Vec<u64>,
    parts: Vec<u64>,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mpi")
            .field("slot", &self.slot)
            .field("session", &self.session)
            .finish_non_exhaustive()
    }
}

/// What a member says of itself before anything else is sent.
#[derive(Clone, Copy)]
struct Head {
    /// Of all that must agree.
    hash: u64,
    /// What it brings.
    bytes: usize,
    /// Whether that follows at once.
    inline: bool,
    /// Its size in the free dimension, or whom it wants to receive from.
    aux: u64,
}

impl Head {
    fn words(&self) -> [u64; HEAD_WORDS] {
        [self.hash, self.bytes as u64, u64::from(self.inline), self.aux]
    }

    fn read(bytes: &[u8]) -> Self {
        let word = |n: usize| {
            bytes[n * 8..].first_chunk().map_or(0, |word: &[u8; 8]| u64::from_ne_bytes(*word))
        };
        Self {
            hash: word(0),
            bytes: usize::try_from(word(1)).unwrap_or(usize::MAX),
            inline: word(2) != 0,
            aux: word(3),
        }
    }

    /// How much follows in a second message.
    fn rest(&self) -> usize {
        if self.inline {
            self.bytes.saturating_sub(INLINE_BYTES).min(SMALL_BYTES - INLINE_BYTES)
        } else {
            0
        }
    }
}

/// A collective while this slot takes part in it.
struct Call<'a> {
    engine: &'a Inner,
    site: &'a Site,
    comm: &'a Communicator,
}

impl Mpi {
    /// The engine of this process's slot, and a communicator for each group it is in. All processes
    /// call this.
    pub(crate) fn new(
        session: Arc<Session>,
        topology: Arc<Topology>,
        deadline: Duration,
    ) -> crate::Result<Self> {
        let failed = |reason: String| Error::Mpi { reason };
        let (slot, slots) = (session.rank(), topology.slots());
        if session.size() != slots {
            return Err(failed(format!(
                "{} processes do not fill a mesh of {slots} slots",
                session.size()
            )));
        }
        let long = topology.long_axes();
        if long.count_ones() as usize > MAX_AXES {
            return Err(failed(format!("a mesh has up to {MAX_AXES} axes longer than 1")));
        }
        let mut groups = BTreeMap::new();
        // In the same order everywhere, the numbers of sets.
        for set in (1..=long).filter(|set| set & !long == 0) {
            let (group, position) = topology.groups(set).seat(slot);
            let small = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
            let comm = session
                .world
                .split(Some(small(group)), small(position))
                .map_err(|error| failed(error.to_string()))?;
            groups.extend(comm.map(|comm| (set, comm)));
        }
        let (pending, scratch) = (Pending::default(), Mutex::default());
        Ok(Self(Arc::new(Inner { topology, slot, deadline, groups, pending, scratch, session })))
    }

    /// The lists of all processes, of any tensors: every process brings as many, in any shapes.
    pub(crate) fn exchange(&self, list: &[Tensor]) -> crate::Result<Vec<Vec<Tensor>>> {
        processes::exchange(self, &self.0.topology, self.0.slot, &Device::Cpu, list)
    }

    /// Enters a collective; `None` for a group of one.
    fn enter<'a>(&'a self, site: &'a Site) -> Result<Option<(Call<'a>, Entered<'a>)>> {
        let engine = &*self.0;
        let entered = engine.pending.enter(engine.slot, &site.call)?;
        if site.size == 1 {
            return Ok(None);
        }
        let set = engine.topology.long_axes() & site.call.set;
        let Some(comm) = engine.groups.get(&set) else {
            bail!("no communicator along {}", site.call.axes)
        };
        Ok(Some((Call { engine, site, comm }, entered)))
    }
}

type Incoming<'a> = (usize, Kind, &'a mut [u8]);
type Outgoing<'a> = (usize, Kind, &'a [u8]);

impl Call<'_> {
    /// The other members, each one beginning with its successor, so that not all send to the same
    /// one.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let Site { size, position, .. } = *self.site;
        (1..size).map(move |step| (position + step) % size)
    }

    /// Receives and sends all of these; nothing is sent where there is nothing to send.
    ///
    /// Whatever goes wrong in MPI ends the program: messages that were started could not be taken
    /// back.
    fn transfer<'t>(
        &self,
        incoming: impl IntoIterator<Item = Incoming<'t>>,
        outgoing: impl IntoIterator<Item = Outgoing<'t>>,
    ) {
        let done = ferrompi::scope(|scope| {
            let mut requests = Vec::new();
            for (from, kind, bytes) in incoming {
                for piece in bytes.chunks_mut(MESSAGE_BYTES) {
                    requests.push((
                        from,
                        self.check(self.comm.irecv(scope, piece, rank(from), kind as i32)),
                    ));
                }
            }
            for (to, kind, bytes) in outgoing {
                for piece in bytes.chunks(MESSAGE_BYTES) {
                    requests.push((
                        to,
                        self.check(self.comm.isend(scope, piece, rank(to), kind as i32)),
                    ));
                }
            }
            self.wait(requests);
            Ok(())
        });
        self.check(done);
    }

    /// Sends what `root` has in `bytes` to all members, through a tree.
    fn broadcast(&self, bytes: &mut [u8], root: usize) {
        let done = ferrompi::scope(|scope| {
            let start = |piece| (root, self.check(self.comm.ibroadcast(scope, piece, rank(root))));
            self.wait(bytes.chunks_mut(MESSAGE_BYTES).map(start).collect());
            Ok(())
        });
        self.check(done);
    }

    /// Waits for messages from and to these members, until the deadline.
    fn wait(&self, mut requests: Vec<(usize, Request<'_>)>) {
        let (after, mut tries, mut start) = (self.engine.deadline, 0_u32, None);
        loop {
            requests.retain_mut(|(_, request)| self.check(request.test()).is_none());
            if requests.is_empty() {
                return;
            }
            tries = tries.wrapping_add(1);
            if tries.is_multiple_of(TRIES) {
                if start.get_or_insert_with(Instant::now).elapsed() > after {
                    self.end_late(&requests, after);
                }
                thread::yield_now();
            }
        }
    }

    /// Ends all processes because some members have not come in time.
    fn end_late(&self, requests: &[(usize, Request<'_>)], after: Duration) -> ! {
        let groups = self.engine.topology.groups(self.site.call.set);
        let members = groups.members_with(self.engine.slot);
        let mut missing: Vec<usize> = requests.iter().map(|(member, _)| members[*member]).collect();
        missing.sort_unstable();
        missing.dedup();
        let (index, call) = (self.engine.slot, Arc::clone(&self.site.call));
        end(
            &self.engine.session.world,
            &Error::Deadline { index, call, after, missing }.to_string(),
        )
    }

    fn check<T>(&self, result: ferrompi::Result<T>) -> T {
        result.unwrap_or_else(|error| {
            end(&self.engine.session.world, &format!("{error} in {}", self.site.call))
        })
    }

    /// Tells all members of this one's call, and what it brings if that is small; returns what they
    /// told.
    ///
    /// What they brought inline lies in `envelopes`, at [`inline`].
    ///
    /// # Errors
    ///
    /// On all members alike, if they do not agree.
    fn meet(
        &self,
        tensors: &[Tensor],
        aux: u64,
        bytes: &[u8],
        may_inline: bool,
        envelopes: &mut Vec<u64>,
    ) -> Result<Vec<Head>> {
        let Site { size, position, .. } = *self.site;
        let inline = may_inline && bytes.len() <= SMALL_BYTES;
        let own =
            Head { hash: agreement(&self.site.call, tensors), bytes: bytes.len(), inline, aux };
        envelopes.resize(size * SLOT_BYTES / 8, 0);
        let slots: &mut [u8] = cast_slice_mut(envelopes);
        let (first, rest) = bytes.split_at(if inline { bytes.len().min(INLINE_BYTES) } else { 0 });
        let rest = if inline { rest } else { &[] };
        let mut letter = [0; HEAD_BYTES + INLINE_BYTES];
        letter[..HEAD_BYTES].copy_from_slice(cast_slice(&own.words()));
        letter[HEAD_BYTES..HEAD_BYTES + first.len()].copy_from_slice(first);
        let letter = &letter[..HEAD_BYTES + first.len()];
        let done = ferrompi::scope(|scope| {
            // Until the others have read how much there is, in a scope of its own.
            let mut late = Vec::new();
            if !rest.is_empty() {
                for to in self.others() {
                    late.push((
                        to,
                        self.check(self.comm.isend(scope, rest, rank(to), Kind::Rest as i32)),
                    ));
                }
            }
            let places = slots
                .chunks_exact_mut(SLOT_BYTES)
                .enumerate()
                .filter(|(from, _)| *from != position);
            self.transfer(
                places.map(|(from, slot)| {
                    (from, Kind::Envelope, &mut slot[..HEAD_BYTES + INLINE_BYTES])
                }),
                self.others().map(|to| (to, Kind::Envelope, letter)),
            );
            let places = slots
                .chunks_exact_mut(SLOT_BYTES)
                .enumerate()
                .filter(|(from, _)| *from != position);
            let rests = places.map(|(from, slot)| {
                let rest = Head::read(slot).rest();
                (from, Kind::Rest, &mut slot[HEAD_BYTES + INLINE_BYTES..][..rest])
            });
            self.transfer(rests, []);
            self.wait(late);
            Ok(())
        });
        self.check(done);
        slots[position * SLOT_BYTES..][..HEAD_BYTES].copy_from_slice(cast_slice(&own.words()));
        let heads: Vec<Head> = slots.chunks_exact(SLOT_BYTES).map(Head::read).collect();
        match heads.iter().position(|head| head.hash != heads[0].hash) {
            None => Ok(heads),
            Some(other) => Err(self.mismatch(other, tensors)),
        }
    }

    /// What all members return if the first one and `other` do not agree.
    fn mismatch(&self, other: usize, tensors: &[Tensor]) -> candle_core::Error {
        let own = description(&self.site.call, tensors);
        let mut texts = vec![0; self.site.size * TEXT_BYTES];
        let places = texts
            .chunks_exact_mut(TEXT_BYTES)
            .enumerate()
            .filter(|(from, _)| *from != self.site.position);
        self.transfer(
            places.map(|(from, place)| (from, Kind::Text, place)),
            self.others().map(|to| (to, Kind::Text, &own[..])),
        );
        texts[self.site.position * TEXT_BYTES..][..TEXT_BYTES].copy_from_slice(&own);
        let text = |member: usize| texts[member * TEXT_BYTES..][..TEXT_BYTES].to_vec();
        disagreement(&self.engine.topology, self.engine.slot, &self.site.call, other, text)
    }

    /// Sends `x(n)` to each member n; returns what all, this one included, have for this one, in
    /// the order of the group.
    ///
    /// What they have is of one length, and nothing is returned if it is nothing.
    fn collect<'x>(&self, x: impl Fn(usize) -> &'x [u8], parts: &'x mut Vec<u64>) -> Vec<&'x [u8]> {
        let Site { size, position, .. } = *self.site;
        let own = x(position);
        let arrived = words(parts, own.len() * (size - 1));
        let places = arrived.chunks_exact_mut(own.len().max(1)).enumerate();
        self.transfer(
            places.map(|(n, part)| (n + usize::from(n >= position), Kind::Data, part)),
            self.others().map(|to| (to, Kind::Data, x(to))),
        );
        let mut all: Vec<&[u8]> = arrived.chunks_exact(own.len().max(1)).collect();
        if !own.is_empty() {
            all.insert(position, own);
        }
        all
    }

    /// The reduction of all members' `x`, which are of one length: each member makes a part of it,
    /// a chunk at a time.
    fn reduce(
        &self,
        dtype: DType,
        x: &[u8],
        sums: &mut [u8],
        reduction: Reduction,
        parts: &mut Vec<u64>,
    ) -> Result<()> {
        let Site { size, position, .. } = *self.site;
        let item = dtype.size_in_bytes();
        for (x, sums) in x.chunks(size * PART_BYTES).zip(sums.chunks_mut(size * PART_BYTES)) {
            let place = |member| {
                let Range { start, end } = balanced(x.len() / item, member, size);
                start * item..end * item
            };
            let summands = self.collect(|member| &x[place(member)], parts);
            let mut results = split(sums, (0..size).map(|member| place(member).len()));
            reduce::bytes(dtype, &summands, reduction, results[position])?;
            let own = mem::take(&mut results[position]);
            let own = &*own;
            let results = results.into_iter().enumerate().filter(|(from, _)| *from != position);
            self.transfer(
                results.map(|(from, part)| (from, Kind::Data, part)),
                self.others().map(|to| (to, Kind::Data, own)),
            );
        }
        Ok(())
    }

    /// Reduces, for each member, the tensor of that member's own choice: `x[n]` goes to member n.
    fn reduce_to_each(
        &self,
        dtype: DType,
        x: &[&[u8]],
        sums: &mut [u8],
        reduction: Reduction,
        parts: &mut Vec<u64>,
    ) -> Result<()> {
        let position = self.site.position;
        let longest = x.iter().map(|x| x.len()).max().unwrap_or_default();
        for start in (0..longest).step_by(PART_BYTES) {
            let part = |x: usize| start.min(x)..(start + PART_BYTES).min(x);
            let summands = self.collect(|member| &x[member][part(x[member].len())], parts);
            reduce::bytes(dtype, &summands, reduction, &mut sums[part(x[position].len())])?;
        }
        Ok(())
    }
}

impl Engine for Mpi {
    fn all_reduce(&self, site: &Site, x: &Tensor, reduction: Reduction) -> Result<Tensor> {
        let Some((call, _entered)) = self.enter(site)? else { return x.force_contiguous() };
        let host = on_host(x)?;
        let mut sums = buffer(host.dtype(), host.elem_count())?;
        let scratch = &mut *lock(&self.0.scratch);
        with_bytes(&host, |bytes| {
            let heads =
                call.meet(slice::from_ref(&host), 0, bytes, true, &mut scratch.envelopes)?;
            if heads[site.position].inline {
                let summands = all_inline(bytes, site.position, &heads, &scratch.envelopes);
                reduce::bytes(host.dtype(), &summands, reduction, sums.bytes_mut())
            } else {
                call.reduce(host.dtype(), bytes, sums.bytes_mut(), reduction, &mut scratch.parts)
            }
        })?;
        sums.tensor(host.dims())?.to_device(x.device())
    }

    fn reduce_lists(
        &self,
        site: &Site,
        list: Vec<Tensor>,
        wanted: &[usize],
        reduction: Reduction,
    ) -> Result<Vec<Tensor>> {
        let device = list.first().map_or(Device::Cpu, |first| first.device().clone());
        let list: Vec<Tensor> = list.iter().map(on_host).collect::<Result<_>>()?;
        let Some((call, _entered)) = self.enter(site)? else {
            return wanted
                .iter()
                .map(|&n| list[n].force_contiguous()?.to_device(&device))
                .collect();
        };
        let scratch = &mut *lock(&self.0.scratch);
        let mut wishes = vec![0_u8; list.len()];
        for &n in wanted {
            wishes[n] = 1;
        }
        if wishes.len() > SMALL_BYTES {
            bail!("lists of more than {SMALL_BYTES} tensors cannot be summed over processes");
        }
        let heads = call.meet(&list, 0, &wishes, true, &mut scratch.envelopes)?;
        let wishes = all_inline(&wishes, site.position, &heads, &scratch.envelopes);
        let mut sums: BTreeMap<usize, Tensor> = BTreeMap::new();
        // What only one member wants goes straight to it: in each round, one tensor of a type to
        // each member.
        let mut alone: BTreeMap<&str, Vec<Vec<usize>>> = BTreeMap::new();
        for (n, x) in list.iter().enumerate() {
            let wanting: Vec<usize> =
                (0..site.size).filter(|&member| wishes[member][n] != 0).collect();
            match wanting[..] {
                [] => {}
                [one] => alone
                    .entry(x.dtype().as_str())
                    .or_insert_with(|| vec![Vec::new(); site.size])[one]
                    .push(n),
                _ => {
                    let mut sum = buffer(x.dtype(), x.elem_count())?;
                    with_bytes(x, |bytes| {
                        call.reduce(
                            x.dtype(),
                            bytes,
                            sum.bytes_mut(),
                            reduction,
                            &mut scratch.parts,
                        )
                    })?;
                    if wishes[site.position][n] != 0 {
                        sums.insert(n, sum.tensor(x.dims())?);
                    }
                }
            }
        }
        for queues in alone.values() {
            for round in 0..queues.iter().map(Vec::len).max().unwrap_or_default() {
                let turn: Vec<Option<&Tensor>> =
                    queues.iter().map(|queue| Some(&list[*queue.get(round)?])).collect();
                let Some(dtype) = turn.iter().flatten().next().map(|x| x.dtype()) else { continue };
                let own = queues[site.position].get(round);
                let mut sum = buffer(dtype, own.map_or(0, |&n| list[n].elem_count()))?;
                with_all_bytes(&turn, |bytes| {
                    call.reduce_to_each(
                        dtype,
                        bytes,
                        sum.bytes_mut(),
                        reduction,
                        &mut scratch.parts,
                    )
                })?;
                if let Some(&n) = own {
                    sums.insert(n, sum.tensor(list[n].dims())?);
                }
            }
        }
        let sum = |n: &usize| match sums.get(n) {
            Some(sum) => sum.to_device(&device),
            None => bail!("there is no tensor {n} to sum"),
        };
        wanted.iter().map(sum).collect()
    }

    fn all_gather(&self, site: &Site, x: &Tensor) -> Result<Vec<Tensor>> {
        let Some((call, _entered)) = self.enter(site)? else {
            return Ok(vec![x.force_contiguous()?]);
        };
        let host = on_host(x)?;
        let scratch = &mut *lock(&self.0.scratch);
        let free = site.call.free_dim;
        let shape = |head: &Head| {
            let mut dims = host.dims().to_vec();
            if let Some(dim) = free {
                dims[dim] = usize::try_from(head.aux).unwrap_or_default();
            }
            dims
        };
        let gathered = with_bytes(&host, |bytes| {
            let aux = free.map_or(0, |dim| host.dims()[dim] as u64);
            let heads =
                call.meet(slice::from_ref(&host), aux, bytes, true, &mut scratch.envelopes)?;
            let mut parts: Vec<_> = (heads.iter())
                .map(|head| buffer(host.dtype(), shape(head).iter().product()))
                .collect::<Result<_>>()?;
            parts[site.position].bytes_mut().copy_from_slice(bytes);
            for (n, (part, head)) in parts.iter_mut().zip(&heads).enumerate() {
                if n != site.position && head.inline {
                    part.bytes_mut().copy_from_slice(inline(&scratch.envelopes, n, head));
                }
            }
            let late = parts
                .iter_mut()
                .enumerate()
                .filter(|(n, _)| *n != site.position && !heads[*n].inline);
            let own = if heads[site.position].inline { &[] } else { bytes };
            call.transfer(
                late.map(|(from, part)| (from, Kind::Data, part.bytes_mut())),
                call.others().map(|to| (to, Kind::Data, own)),
            );
            Ok(parts.into_iter().zip(heads).collect::<Vec<_>>())
        })?;
        gathered
            .into_iter()
            .map(|(part, head)| part.tensor(&shape(&head))?.to_device(x.device()))
            .collect()
    }

    fn all_to_all(&self, site: &Site, parts: Vec<Tensor>) -> Result<Vec<Tensor>> {
        let device = parts.first().map_or(Device::Cpu, |first| first.device().clone());
        let Some((call, _entered)) = self.enter(site)? else {
            return parts.iter().map(Tensor::force_contiguous).collect();
        };
        // Copies: two locks on one storage, with somebody who waits to write between them, would
        // never be granted.
        let parts: Vec<Tensor> =
            parts.iter().map(|part| on_host(part)?.force_contiguous()).collect::<Result<_>>()?;
        let scratch = &mut *lock(&self.0.scratch);
        call.meet(&parts, 0, &[], false, &mut scratch.envelopes)?;
        let own = &parts[site.position];
        let mut arrived: Vec<_> =
            parts.iter().map(|_| buffer(own.dtype(), own.elem_count())).collect::<Result<_>>()?;
        let turn: Vec<Option<&Tensor>> = parts.iter().map(Some).collect();
        with_all_bytes(&turn, |bytes| {
            arrived[site.position].bytes_mut().copy_from_slice(bytes[site.position]);
            let places = arrived.iter_mut().enumerate().filter(|(from, _)| *from != site.position);
            call.transfer(
                places.map(|(from, part)| (from, Kind::Data, part.bytes_mut())),
                call.others().map(|to| (to, Kind::Data, bytes[to])),
            );
            Ok(())
        })?;
        arrived.into_iter().map(|part| part.tensor(own.dims())?.to_device(&device)).collect()
    }

    fn receive(&self, site: &Site, x: &Tensor, from: Option<usize>) -> Result<Option<Tensor>> {
        let Some((call, _entered)) = self.enter(site)? else {
            return from.map(|_| x.force_contiguous()).transpose();
        };
        let host = on_host(x)?;
        let mut received = buffer(host.dtype(), host.elem_count())?;
        let scratch = &mut *lock(&self.0.scratch);
        with_bytes(&host, |bytes| {
            let aux = from.map_or(NOBODY, |from| from as u64);
            let heads =
                call.meet(slice::from_ref(&host), aux, bytes, true, &mut scratch.envelopes)?;
            let into = received.bytes_mut();
            match from {
                Some(from) if from == site.position => into.copy_from_slice(bytes),
                Some(from) if heads[from].inline => {
                    into.copy_from_slice(inline(&scratch.envelopes, from, &heads[from]));
                }
                _ => {}
            }
            if heads[site.position].inline {
                return Ok(());
            }
            if let Some(from) =
                from.filter(|_| site.size > 2 && heads.iter().all(|head| head.aux == aux))
            {
                // A tree, instead of one that sends to all.
                call.broadcast(into, from);
            } else {
                let from = from.filter(|&from| from != site.position);
                let to = call.others().filter(|&to| heads[to].aux == site.position as u64);
                call.transfer(
                    from.map(|from| (from, Kind::Data, into)),
                    to.map(|to| (to, Kind::Data, bytes)),
                );
            }
            Ok(())
        })?;
        from.map(|_| received.tensor(host.dims())?.to_device(x.device())).transpose()
    }

    fn barrier(&self, site: &Site) -> Result<()> {
        let Some((call, _entered)) = self.enter(site)? else { return Ok(()) };
        call.meet(&[], 0, &[], true, &mut lock(&self.0.scratch).envelopes).map(drop)
    }

    fn returned(&self) {
        if let Err(error) = processes::leave(self, &self.0.topology, self.0.slot) {
            end(&self.0.session.world, &error.to_string());
        }
    }

    /// Does not return: the others wait in MPI, where nothing but an end of the program reaches
    /// them.
    fn failed(&self, error: Error) {
        end(&self.0.session.world, &processes::with_causes(&error));
    }
}

fn rank(member: usize) -> i32 {
    // Members are counted in MPI's own 32 bits.
    i32::try_from(member).unwrap_or(i32::MAX)
}

/// What a member brought with its envelope.
fn inline<'a>(envelopes: &'a [u64], member: usize, head: &Head) -> &'a [u8] {
    &cast_slice(envelopes)[member * SLOT_BYTES + HEAD_BYTES..][..head.bytes.min(SMALL_BYTES)]
}

/// What all members brought with their envelopes, this one's own from where it is.
fn all_inline<'a>(
    own: &'a [u8],
    position: usize,
    heads: &[Head],
    envelopes: &'a [u64],
) -> Vec<&'a [u8]> {
    let of = |(n, head)| if n == position { own } else { inline(envelopes, n, head) };
    heads.iter().enumerate().map(of).collect()
}

/// So many bytes of a scratch, which grows if it must.
fn words(scratch: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
    if scratch.len() < bytes.div_ceil(8) {
        scratch.resize(bytes.div_ceil(8), 0);
    }
    &mut cast_slice_mut(scratch)[..bytes]
}

fn split(mut bytes: &mut [u8], lens: impl Iterator<Item = usize>) -> Vec<&mut [u8]> {
    let part = |len| {
        let (part, rest) = mem::take(&mut bytes).split_at_mut(len);
        bytes = rest;
        part
    };
    lens.map(part).collect()
}
