//! Tests of the engine without devices: processes are threads, and messages go through memory.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Condvar, Mutex},
    thread,
};

use candle_core::{DType, Var};
use core_types::Seed;

use super::{
    link::{LinkTransfer, TransferError, TransferHandle, Transport},
    *,
};
use crate::{
    axes::MeshAxes,
    engine::layout::{Run, RunLayout},
    mesh::DeviceMesh,
    replica::{Replica, ReplicaContext, collectives::Collectives},
    spec::join::bits_equal,
    sync::lock,
};

const SEED: Seed = Seed::new(1);
const LIMIT: Duration = Duration::from_mins(1);

/// Sender, receiver, and the number of earlier messages between them.
type Key = (usize, usize, usize);

/// The messages that were sent and not received.
#[derive(Debug)]
struct Messages<T>(Mutex<BTreeMap<Key, T>>, Condvar);

impl<T> Messages<T> {
    fn send(&self, key: Key, message: T) {
        assert!(lock(&self.0).insert(key, message).is_none());
        self.1.notify_all();
    }

    fn receive(&self, key: Key) -> T {
        // A failed rank sends nothing more.
        let mut messages = self
            .1
            .wait_timeout_while(lock(&self.0), LIMIT, |messages: &mut BTreeMap<_, T>| {
                !messages.contains_key(&key)
            })
            .unwrap()
            .0;
        messages.remove(&key).unwrap()
    }
}

impl<T> Default for Messages<T> {
    fn default() -> Self {
        Self(Mutex::default(), Condvar::new())
    }
}

/// The pending messages of all communicators with one id.
#[derive(Debug, Default)]
struct Network {
    bytes: Messages<Vec<u8>>,
    tensors: Messages<Tensor>,
}

/// The network as seen by one rank.
#[derive(Debug)]
struct Port {
    network: Arc<Network>,
    rank: usize,
    /// The number of messages sent to, and awaited from, each rank.
    n_bytes: Mutex<BTreeMap<usize, (usize, usize)>>,
    n_tensors: Mutex<BTreeMap<usize, (usize, usize)>>,
}

impl Port {
    fn new(network: &Arc<Network>, rank: usize) -> Self {
        let (n_bytes, n_tensors) = Default::default();
        Self { network: Arc::clone(network), rank, n_bytes, n_tensors }
    }
}

/// Returns the count and increments it.
fn next(count: &mut usize) -> usize {
    *count += 1;
    *count - 1
}

impl Transport for Port {
    fn exchange(
        &self,
        bytes: Vec<u8>,
        slots: &[usize],
        _: Duration,
    ) -> std::result::Result<Vec<Vec<u8>>, TransferError> {
        let mut counts = lock(&self.n_bytes);
        for &slot in slots {
            let n = next(&mut counts.entry(slot).or_default().0);
            self.network.bytes.send((self.rank, slot, n), bytes.clone());
        }
        let arrived: Vec<Vec<u8>> = slots
            .iter()
            .map(|&slot: &usize| {
                let n = next(&mut counts.entry(slot).or_default().1);
                self.network.bytes.receive((slot, self.rank, n))
            })
            .collect();
        assert!(arrived.iter().all(|arrived| arrived.len() == bytes.len()));
        Ok(arrived)
    }

    /// Received items become visible only at `make_device_wait`.
    fn transfer(
        &self,
        transfer: LinkTransfer,
        _: Duration,
    ) -> std::result::Result<Box<dyn TransferHandle>, TransferError> {
        let LinkTransfer { source, outgoing, destination, incoming, .. } = transfer;
        assert!(source.is_contiguous());
        assert!(!outgoing.is_empty() || !incoming.is_empty());
        let mut counts = lock(&self.n_tensors);
        for (to, part) in outgoing {
            assert!(!part.is_empty());
            let x = source.narrow(0, part.start, part.len()).unwrap().copy().unwrap();
            let n = next(&mut counts.entry(to).or_default().0);
            self.network.tensors.send((self.rank, to, n), x);
        }
        let mut end = 0;
        let incoming = incoming.into_iter().map(|(from, place)| {
            assert!(!place.is_empty() && place.start >= end && place.start % 16 == 0);
            end = place.end;
            ((from, self.rank, next(&mut counts.entry(from).or_default().1)), place)
        });
        let incoming = incoming.collect();
        let network = Arc::clone(&self.network);
        Ok(Box::new(InMemory { network, destination, incoming: Mutex::new(incoming) }))
    }
}

/// A started transfer.
#[derive(Debug)]
struct InMemory {
    network: Arc<Network>,
    destination: Tensor,
    incoming: Mutex<Vec<(Key, Range<usize>)>>,
}

impl TransferHandle for InMemory {
    fn make_device_wait(&self) -> Result<()> {
        for (key, place) in lock(&self.incoming).drain(..) {
            let x = self.network.tensors.receive(key);
            assert_eq!((x.dtype(), x.dims()), (self.destination.dtype(), &[place.len()][..]));
            self.destination.slice_set(&x, 0, place.start)?;
        }
        Ok(())
    }
}

fn channel(network: &Arc<Network>, exit: &ExitHandler) -> NcclChannel {
    NcclChannel {
        link: Box::new(Port::new(network, exit.slot)),
        header_timeout: LIMIT,
        deadline: LIMIT,
        exit: exit.clone(),
        broken: OnceLock::new(),
    }
}

type Axes = [(&'static str, usize)];

/// Runs `f` as one process for each slot of a grid; returns the results by rank.
fn run<T: Send>(axes: &Axes, f: impl Fn(&Replica) -> T + Sync) -> Vec<T> {
    let axes = axes.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
    let topology = Arc::new(Topology::new(axes, 64).unwrap());
    let networks = [Arc::<Network>::default(), Arc::default()];
    let replica = |slot| {
        let exit = ExitHandler { slot };
        let [blocking, background] = networks.each_ref().map(|network| channel(network, &exit));
        let engine = Nccl(Arc::new(NcclInner {
            topology: Arc::clone(&topology),
            slot,
            device: Device::Cpu,
            counters: Default::default(),
            current: CurrentCall::default(),
            blocking,
            comm_thread: CommThread::new().unwrap(),
            background: Arc::new(background),
            exit,
        }));
        Replica::new(ReplicaContext {
            slot,
            local_index: 0,
            device: Device::Cpu,
            topology: Arc::clone(&topology),
            collectives: Collectives::new(Arc::new(engine)),
            real_rows: None,
            seed: SEED,
        })
    };
    let (f, replica) = (&f, &replica);
    let results = thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..topology.slots()).map(|slot| scope.spawn(move || f(&replica(slot)))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for network in networks {
        assert!(lock(&network.bytes.0).is_empty(), "all that is sent is received");
        assert!(lock(&network.tensors.0).is_empty(), "all that is sent is received");
    }
    results
}

/// Compares the results to the bit with the engine of threads.
fn check(axes: &Axes, f: impl Fn(&Replica) -> Result<Vec<Tensor>> + Clone + Send + Sync + 'static) {
    let results = run(axes, |replica| f(replica).unwrap());
    let builder =
        axes.iter().fold(DeviceMesh::builder(), |builder, (name, size)| builder.axis(name, *size));
    let g = f.clone();
    let model = builder.pin(false).cpu().unwrap().pmap(move |ctx, _: Tensor| g(ctx)).in_axes(None);
    let expected = model.call_sharded(Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()).unwrap();
    for (results, expected) in results.iter().zip(expected.shards()) {
        assert_eq!(results.len(), expected.len());
        for (result, expected) in results.iter().zip(expected) {
            assert!(bits_equal(result, expected).unwrap(), "{result} for {expected}");
        }
    }
}

/// Returns numbers that differ by replica, with sums that depend on the order.
fn input(ctx: &Replica, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let items: usize = shape.iter().product();
    Tensor::from_iter(
        (0..items).map(|n: usize| ((n * 7919 + ctx.slot() * 104_729) % 2003) as f32 * 0.0625),
        &Device::Cpu,
    )?
    .reshape(shape)?
    .to_dtype(dtype)
}

fn everywhere(
    f: impl Fn(&Replica, &MeshAxes, DType) -> Result<Vec<Tensor>> + Clone + Send + Sync + 'static,
) {
    for axes in [&[("a", 3)][..], &[("a", 2), ("b", 2)], &[("a", 1), ("b", 2)]] {
        let sets: Vec<MeshAxes> =
            axes.iter().map(|(name, _)| (*name).into()).chain([ALL]).collect();
        for set in sets {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::U32, DType::I64] {
                let (f, set) = (f.clone(), set.clone());
                check(axes, move |ctx| f(ctx, &set, dtype));
            }
        }
    }
}

#[test]
fn sums_match_threads() {
    everywhere(|ctx, set, dtype| {
        let mut all = Vec::new();
        for count in [0, 1, 5, 70_001] {
            let x = input(ctx, &[count], dtype)?;
            all.extend([ctx.psum(&x, set)?, ctx.pmax(&x, set)?, ctx.pmin(&x, set)?]);
            if dtype.is_float() {
                all.push(ctx.pmean(&x, set)?);
            }
        }
        Ok(all)
    });
}

#[test]
fn moves_match_threads() {
    everywhere(|ctx, set, dtype| {
        let (size, rank) = (ctx.axis_size(set)?, ctx.axis_index(set)?);
        let turn: Vec<_> = (0..size).map(|n| (n, (n + 1) % size)).collect();
        let x = input(ctx, &[4, size * 3, 2], dtype)?;
        let uneven = input(ctx, &[5 * rank, 8], dtype)?;
        let view = input(ctx, &[8, rank + 3], dtype)?.t()?.narrow(0, 1, rank + 1)?;
        let mut all = vec![ctx.all_gather(&uneven, 0, set)?, ctx.all_gather(&view, 0, set)?];
        all.extend([
            ctx.all_gather(&x, 1, set)?,
            ctx.all_to_all(&x, 1, 2, set)?,
            ctx.psum_scatter(&x, 1, set)?,
        ]);
        all.extend([ctx.ppermute(&x, &turn, set)?, ctx.ppermute(&x, &turn[1..], set)?]);
        for root in 0..size {
            all.push(ctx.broadcast(&x, root, set)?);
        }
        ctx.barrier(set)?;
        Ok(all)
    });
}

/// Cuts each tensor into runs of 5 items at most, assigned to the ranks from the last to the first.
fn layout(tensors: &[(Vec<usize>, DType)], ranks: usize) -> RunLayout {
    let mut by_rank = vec![Vec::new(); ranks];
    for (tensor, (shape, _)) in tensors.iter().enumerate() {
        let size: usize = shape.iter().product();
        for (n, start) in (0..size).step_by(5).enumerate() {
            let items = start..size.min(start + 5);
            by_rank[(n + 1) * (ranks - 1) % ranks].push(Run { tensor, items });
        }
    }
    RunLayout::new("layer", tensors.to_vec(), by_rank).unwrap()
}

#[test]
fn runs_match_threads() {
    everywhere(|ctx, set, dtype| {
        let tensors =
            [(vec![3, 4], dtype), (vec![], DType::F32), (vec![11], dtype), (vec![0, 2], dtype)];
        let layout = layout(&tensors, ctx.axis_size(set)?);
        let list: Vec<Tensor> = tensors
            .iter()
            .map(|(shape, dtype)| input(ctx, shape, *dtype))
            .collect::<Result<_>>()?;
        let own =
            |run: &Run| list[run.tensor].flatten_all()?.narrow(0, run.items.start, run.items.len());
        let own: Vec<Tensor> =
            layout.runs(ctx.axis_index(set)?).iter().map(own).collect::<Result<_>>()?;
        let mut all = Vec::new();
        for gathered in [
            ctx.gather_runs(own.clone(), &layout, set)?,
            ctx.start_gather_runs(own, &layout, set)?.wait()?,
        ] {
            assert!(gathered.iter().all(|leaf| leaf.is_variable()));
            all.extend(gathered.iter().map(Var::as_detached_tensor));
        }
        all.extend(ctx.reduce_runs(list.clone(), &layout, set)?);
        let trees = ctx.psum(&list, set)?;
        all.extend(ctx.start_reduce_runs(list, &layout, set)?.wait()?);
        all.extend(trees);
        Ok(all)
    });
}

#[test]
fn mismatch_names_both_calls() {
    let errors = run(&[("a", 3)], |ctx| {
        let x = Tensor::ones(ctx.slot().min(1) + 3, DType::F32, &Device::Cpu).unwrap();
        ctx.psum(&x, ALL).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("replica 0 calls psum of f32 [3]"), "{error}");
        assert!(error.contains("replica 1 calls psum of f32 [4]"), "{error}");
    }
}

#[test]
fn failed_collective_blocks_later_ones() {
    let network = Arc::<Network>::default();
    let topology = Topology::new(vec![("a".into(), 2)], 2).unwrap();
    let ctx = GroupContext::new(ALL, &topology, 0, "psum", None).unwrap();
    let fails: [fn() -> Result<()>; 2] = [|| bail!("no memory"), || panic!("no memory")];
    for fail in fails {
        let channel = channel(&network, &ExitHandler { slot: 0 });
        let call = NcclCall { channel: &channel, ctx: &ctx };
        call.carry_out(|| Ok(())).unwrap();
        assert!(channel.broken.get().is_none());
        assert!(call.carry_out(fail).unwrap_err().to_string().contains("no memory"));
        let refused = call.exchange_headers(0, 0, Vec::new).unwrap_err().to_string();
        assert!(
            refused.contains("psum over all axes") && refused.contains("no memory"),
            "{refused}"
        );
        // The other rank waits for data: it must not get a header in their place.
        assert!(lock(&network.bytes.0).is_empty());
    }
}

#[test]
fn unsupported_dtypes_are_rejected() {
    for dtype in [DType::I16, DType::I32] {
        // Nothing is sent, or the network would not be empty.
        let errors = run(&[("a", 2)], |ctx| {
            let x = Tensor::zeros(2, dtype, &Device::Cpu).unwrap();
            [ctx.psum(&x, ALL), ctx.all_gather(&x, 0, ALL)].map(|x| x.unwrap_err().to_string())
        });
        let refusal = format!("tensors of type {} cannot be sent over NCCL", dtype.as_str());
        assert!(errors.iter().flatten().all(|error| error.contains(&refusal)), "{errors:?}");
    }
}

#[test]
fn world_size_must_match_the_mesh() {
    let topology = Arc::new(Topology::new(vec![("a".into(), 3)], 64).unwrap());
    let place = Placement::new(0, 2).unwrap();
    let store = Path::new("not looked at");
    let outcome = Nccl::new(place, &Device::Cpu, store, topology, Duration::ZERO);
    assert!(
        matches!(outcome, Err(Error::Process(ProcessError::Nccl { reason })) if reason == "2 processes do not fill a mesh of 3 slots")
    );
}
