//! Units as operations in candle's graph.
//!
//! In the forward pass, the unit's parameters are gathered, its function runs without a graph, the
//! parameters are freed, and the results are recorded in the graph as an operation on the unit's
//! inputs. In the backward pass, the parameters are gathered again, the function runs again with a
//! graph that ends at the unit's inputs and parameters, this graph is differentiated, and the
//! gradients of the parameters are reduce-scattered. candle's `backward` visits units in reverse
//! order, so only one unit's graph exists at a time. (Chen, Xu, Zhang and Guestrin, "Training Deep
//! Nets with Sublinear Memory Cost", arXiv 1604.06174, and Zhao et al., "PyTorch FSDP", arXiv
//! 2304.11277.)

use std::{
    any::Any,
    collections::BTreeMap,
    iter, mem,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use candle_core::{Result, Tensor, Var};
use candle_nn::VarBuilder;
use fused_ops::{backward_from_many, with_backward_many, with_direct_grads};
use pmap_mesh::TensorTree;

use crate::{
    device::shares_memory,
    error::training::TrainingError,
    loss, tree,
    units::{freed_params::UnitPass, keep_rules::Keep, model::Unit, session::Session},
};

/// A pass through a unit, as an operation in candle's graph.
struct UnitOperation<X, F> {
    session: Arc<Session>,
    name: String,
    f: F,
    /// The detached inputs in their tree. The mutex makes the tree `Sync`, which a [`TensorTree`]
    /// need not be.
    x: Mutex<X>,
    inputs: Vec<UnitInput>,
    graph: Mutex<GraphState>,
}

/// One detached tensor of the inputs.
struct UnitInput {
    tensor: Tensor,
    /// Whether the input needs a gradient.
    is_tracked: bool,
}

/// The state of the unit's own graph.
enum GraphState {
    /// The graph is built in the backward pass.
    Later,
    /// The graph is kept from the forward pass.
    Kept(UnitGraph),
    /// The graph is kept from the forward pass, with its parameters freed.
    Freed(UnitGraph, UnitPass),
    /// The graph is differentiated already.
    Done,
}

/// A unit's own graph.
struct UnitGraph {
    gathered: BTreeMap<String, Var>,
    /// A leaf for each tracked input.
    inputs: Vec<Option<Var>>,
    /// The tensors of the result.
    outputs: Vec<Tensor>,
}

/// Applies `f` to `x` and the parameters of a unit, and records this operation in candle's graph if
/// it must be differentiated.
pub(crate) fn enter<X, R, F>(session: &Arc<Session>, name: &str, x: &X, f: F) -> Result<R>
where
    X: TensorTree,
    R: TensorTree,
    F: Fn(VarBuilder<'_>, &X) -> Result<R> + Send + Sync + 'static,
{
    let unit = session.enter(name)?;
    UnitOperation::new(Arc::clone(session), name, x, f).enter(unit, x)
}

impl<X, R, F> UnitOperation<X, F>
where
    X: TensorTree,
    R: TensorTree,
    F: Fn(VarBuilder<'_>, &X) -> Result<R> + Send + Sync + 'static,
{
    fn new(session: Arc<Session>, name: &str, x: &X, f: F) -> Self {
        let mut inputs = Vec::new();
        let x = tree::map(x, |tensor| {
            let detached = tensor.detach();
            inputs.push(UnitInput { tensor: detached.clone(), is_tracked: tensor.track_op() });
            detached
        });
        Self {
            session,
            name: name.to_owned(),
            f,
            x: Mutex::new(x),
            inputs,
            graph: Mutex::new(GraphState::Later),
        }
    }

    /// Returns the result of the forward pass; `x` are the inputs with their history.
    fn enter(self, unit: &Unit, x: &X) -> Result<R> {
        let is_search = self.session.is_search();
        let has_tracked = self.inputs.iter().any(|input| input.is_tracked);
        let is_tracked = unit.is_trained() || has_tracked || is_search;
        let is_recorded = self.session.is_training() && is_tracked;
        let result = match if is_search { Keep::Inputs } else { unit.keep } {
            Keep::Inputs
                if is_recorded && (is_search || self.session.checks_determinism(&self.name)) =>
            {
                // With a graph of this unit, so that parameters of other units are detected in it.
                let (_, result) = self.run_with_graph("forward")?;
                tree::map(&result, Tensor::detach)
            }
            Keep::Gathered if is_recorded => {
                let (graph, result) = self.run_with_graph("forward")?;
                *lock(&self.graph) = GraphState::Kept(graph);
                tree::map(&result, Tensor::detach)
            }
            Keep::Graph if is_recorded => {
                let (graph, result) = self.run_with_graph("forward")?;
                let result = detach_result(&result, &graph.gathered)?;
                let pass = self.session.free_parameters(&self.name, &graph.gathered)?;
                *lock(&self.graph) = GraphState::Freed(graph, pass);
                result
            }
            Keep::Inputs | Keep::Graph | Keep::Gathered => self.run_without_graph(unit)?,
        };
        if is_recorded { self.record(&result, x) } else { Ok(result) }
    }

    /// Returns the result, recorded in candle's graph as an operation on the inputs.
    fn record(self, result: &R, x: &X) -> Result<R> {
        self.session.expect_gradients(&self.name);
        let anchor = self.session.anchor().clone();
        let tracked = tree::each(x, Tensor::clone).into_iter().filter(Tensor::track_op);
        let inputs: Vec<Tensor> = iter::once(anchor).chain(tracked).collect();
        let input_refs: Vec<&Tensor> = inputs.iter().collect();
        let outputs = tree::each(result, Tensor::clone);
        let backward = move |outputs: &[Tensor], grads| self.backward(outputs, grads);
        Ok(loss::with_leaves(result, with_backward_many(&input_refs, &outputs, backward)?))
    }

    /// Runs the function without a graph.
    fn run_without_graph(&self, unit: &Unit) -> Result<R> {
        let gathered = self.session.gather(&self.name)?;
        let builder = self.session.builder(&self.name, unit, &gathered, false);
        let result = self.call(builder, &lock(&self.x), "forward")?;
        if tree::each(&result, Tensor::track_op).contains(&true) {
            return Err(self.session.record_captured(&self.name, &[]));
        }
        Ok(result)
    }

    /// Runs the function with a graph that ends at the unit's inputs and parameters.
    fn run_with_graph(&self, pass: &str) -> Result<(UnitGraph, R)> {
        let gathered = self.session.gather(&self.name)?;
        let unit = self.session.find(&self.name)?;
        let leaf = |input: &UnitInput| {
            input.is_tracked.then(|| Var::from_tensor(&input.tensor)).transpose()
        };
        let inputs: Vec<Option<Var>> = self.inputs.iter().map(leaf).collect::<Result<_>>()?;
        let tensors = self.inputs.iter().zip(&inputs).map(|(input, leaf)| match leaf {
            Some(leaf) => leaf.as_tensor().clone(),
            None => input.tensor.clone(),
        });
        let x = loss::with_leaves(&*lock(&self.x), tensors.collect());
        let builder = self.session.builder(&self.name, unit, &gathered, true);
        let result = self.call(builder, &x, pass)?;
        let graph = UnitGraph { gathered, inputs, outputs: tree::each(&result, Tensor::clone) };
        let foreign = graph.foreign_variables();
        if !foreign.is_empty() {
            return Err(self.session.record_captured(&self.name, &foreign));
        }
        Ok((graph, result))
    }

    /// Runs the function, and adds the unit and pass to its errors and panics.
    fn call(&self, builder: VarBuilder<'_>, x: &X, pass: &str) -> Result<R> {
        let context = format!("unit {}, {pass} pass", self.name);
        match catch_unwind(AssertUnwindSafe(|| (self.f)(builder, x))) {
            Ok(result) => result.map_err(|error| error.context(context)),
            // The panic is resumed as the replica's own.
            Err(payload) => match panic_message(&*payload) {
                Some(message) => resume_unwind(Box::new(format!("{context}: {message}"))),
                None => resume_unwind(payload),
            },
        }
    }

    /// Returns the gradient of the anchor, which is always `None`, and the gradients of the tracked
    /// inputs. `forward_outputs` are the outputs of the forward pass.
    fn backward(
        &self,
        forward_outputs: &[Tensor],
        grads: Vec<Option<Tensor>>,
    ) -> Result<Vec<Option<Tensor>>> {
        self.session.check_started(&self.name)?;
        let state = mem::replace(&mut *lock(&self.graph), GraphState::Done);
        let UnitGraph { gathered, inputs, outputs } = match state {
            GraphState::Kept(graph) => graph,
            GraphState::Freed(graph, pass) => {
                self.session.restore_parameters(&self.name, pass, &graph.gathered)?;
                graph
            }
            GraphState::Later => {
                let (graph, _) = self.run_with_graph("backward")?;
                self.check_repeatable(forward_outputs, &graph.outputs)?;
                graph
            }
            GraphState::Done => return Err(self.session.differentiated_error(&self.name, "twice")),
        };
        let seeds =
            outputs.into_iter().zip(grads).filter_map(|(output, grad)| Some((output, grad?)));
        let leaves = gathered.values().chain(inputs.iter().flatten()).map(Var::as_tensor);
        let mut grads = with_direct_grads(leaves, || Ok(backward_from_many(seeds)?))?;
        // The anchor comes first, and has no gradient.
        let mut input_grads = vec![None];
        for input in inputs.iter().flatten() {
            input_grads.push(Some(match grads.remove(input) {
                Some(grad) => grad,
                None => input.zeros_like()?,
            }));
        }
        drop(inputs);
        self.session.leave(&self.name, gathered, grads)?;
        Ok(input_grads)
    }

    /// Returns an error if recomputing gave another result than the forward pass.
    fn check_repeatable(&self, before: &[Tensor], again: &[Tensor]) -> Result<()> {
        if !self.session.checks_determinism(&self.name) || all_bytes(before)? == all_bytes(again)? {
            return Ok(());
        }
        Err(self.session.record_local(TrainingError::NotRepeatable { unit: self.name.clone() }))
    }
}

impl UnitGraph {
    /// Returns the variables in the graph that do not belong to the unit.
    fn foreign_variables(&self) -> Vec<&Tensor> {
        let mut foreign = Vec::new();
        for node in self.outputs.iter().flat_map(|output| output.sorted_nodes()) {
            let mut own = self.gathered.values().chain(self.inputs.iter().flatten());
            if node.is_variable() && !own.any(|var| var.id() == node.id()) {
                foreign.push(node);
            }
        }
        foreign
    }
}

/// Detaches a unit's result from the unit's parameters, whose memory will be freed. Views of a
/// parameter are copied, but not the rest of the parameter, which `Tensor::copy` would copy too.
fn detach_result<R: TensorTree>(result: &R, gathered: &BTreeMap<String, Var>) -> Result<R> {
    result.try_map(&mut |output: &Tensor| {
        let is_view = gathered.values().any(|var| shares_memory(output, var));
        if is_view { output.detach().force_contiguous() } else { Ok(output.detach()) }
    })
}

fn all_bytes(tensors: &[Tensor]) -> Result<Vec<(Vec<usize>, Vec<u8>)>> {
    tensors.iter().map(bytes).collect()
}

/// Returns the shape and bits of a tensor; bits make NaN equal to itself and distinguish 0 from -0.
fn bytes(tensor: &Tensor) -> Result<(Vec<usize>, Vec<u8>)> {
    let mut bytes = Vec::new();
    tensor.force_contiguous()?.write_bytes(&mut bytes)?;
    Ok((tensor.dims().to_vec(), bytes))
}

/// Returns the message of a panic.
fn panic_message(payload: &(dyn Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied())
}

/// Locks state of an operation. Ignores poisoning: a panic with the lock held ends the step, so the
/// operation is not used again.
fn lock<T>(guarded: &Mutex<T>) -> MutexGuard<'_, T> {
    guarded.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use candle_core::{CpuStorage, DType, Device, Storage};

    use super::*;

    #[test]
    fn views_are_copied_without_the_parameter() {
        let whole = Var::zeros((5, 4), DType::F32, &Device::Cpu).unwrap();
        let row = whole.t().unwrap().narrow(0, 1, 1).unwrap();
        let kept = detach_result(&row, &BTreeMap::from([("w".to_owned(), whole)])).unwrap();
        assert_eq!(kept.dims(), row.dims());
        let (storage, _) = kept.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(items)) = &*storage else {
            panic!("not an f32 CPU storage")
        };
        assert_eq!(items.len(), 5);
    }
}
