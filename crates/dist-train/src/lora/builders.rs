//! Variable builders that add adapters to the layers of a model's constructor.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use core_types::human::Printable;
use fused_ops::layers::Linear;

use crate::{
    error::Error,
    lora::{
        Lora,
        matrices::{WEIGHT, adapter_dtype, add_adapter, declare_matrices, layer_of, matrix_names},
    },
    parameters::declare::Declared,
};

/// A builder that declares the adapter of each target layer, and returns weights unchanged.
pub(crate) struct AdapterDeclarer<'a> {
    lora: &'a Lora,
    inner: VarBuilder<'a>,
    /// Adapters and matched targets so far. The lock is needed because a constructor may use
    /// several threads. Every change under the lock is complete before anything can panic, so
    /// poisoning is ignored.
    found: Mutex<FoundAdapters>,
}

#[derive(Default)]
struct FoundAdapters {
    adapters: Vec<Declared>,
    targets: BTreeSet<String>,
}

impl<'a> AdapterDeclarer<'a> {
    pub(crate) fn new(lora: &'a Lora, inner: VarBuilder<'a>) -> Self {
        Self { lora, inner, found: Mutex::default() }
    }

    pub(crate) fn builder(&self) -> VarBuilder<'_> {
        let (dtype, device) = (self.inner.dtype(), self.inner.device().clone());
        VarBuilder::from_backend(Box::new(self), dtype, device)
    }

    /// Returns the declared matrices of all targets.
    pub(crate) fn into_adapters(self) -> Result<Vec<Declared>> {
        let found = self.found.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.lora.config.check_all_matched(&found.targets)?;
        Ok(found.adapters)
    }

    /// Returns the name of a parameter in the whole model, given the name in this builder.
    fn full_name(&self, name: &str) -> String {
        let prefix = self.inner.prefix();
        if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") }
    }

    /// Declares the matrices of a layer's adapter.
    fn declare(&self, layer: &str, shape: &Shape, dtype: DType) -> Result<()> {
        let [n_out, n_in] = *shape.dims() else {
            let name = self.full_name(layer);
            let reason = format!(
                "{} has the shape {:?}, adapters are for matrices",
                Printable(&name),
                shape.dims()
            );
            return Err(Error::lora(reason).into());
        };
        if adapter_dtype(dtype) != dtype {
            let reason = format!(
                "{} is of {}, in which the effect of an adapter may vanish: use a 32-bit type, and \
                 `with_base_dtype` for the weights",
                Printable(&self.full_name(layer)),
                dtype.as_str()
            );
            return Err(Error::lora(reason).into());
        }
        for matrix in declare_matrices(layer, self.lora.config.rank, [n_out, n_in], dtype) {
            let Declared { name, shape, init, .. } = &matrix;
            // Requested only so that the inner builder declares the matrix.
            self.inner.get_with_hints_dtype(shape.clone(), name, *init, dtype)?;
            let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.adapters.push(Declared { name: self.full_name(name), ..matrix });
        }
        Ok(())
    }
}

impl SimpleBackend for &AdapterDeclarer<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        _: &Device,
    ) -> Result<Tensor> {
        let layer = layer_of(name);
        let targets = layer.map(|layer| self.lora.config.targets_of(layer)).unwrap_or_default();
        let Some(layer) = layer.filter(|_| !targets.is_empty()) else {
            return self.inner.get_with_hints_dtype(shape, name, init, dtype);
        };
        let base_dtype = self.lora.base_dtype.unwrap_or(dtype);
        let weight = self.inner.get_with_hints_dtype(shape.clone(), name, init, base_dtype)?;
        self.declare(layer, &shape, dtype)?;
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        found.targets.extend(targets.into_iter().cloned());
        Ok(weight)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        self.inner.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}

/// A builder that offers weight and adapter of each adapted layer under PEFT's names, and their sum
/// under the name of the weight.
///
/// A layer has an adapter if the parameters of the adapter exist. The targets are not matched
/// again, because a unit sees only the ends of layer names.
pub(crate) struct AdapterComposer<'a> {
    inner: VarBuilder<'a>,
    scale: f64,
    base_dtype: Option<DType>,
}

impl<'a> AdapterComposer<'a> {
    pub(crate) fn builder(lora: &Lora, inner: VarBuilder<'a>) -> VarBuilder<'a> {
        let (dtype, device) = (inner.dtype(), inner.device().clone());
        let (scale, base_dtype) = (lora.config.scale(), lora.base_dtype);
        VarBuilder::from_backend(Box::new(Self { inner, scale, base_dtype }), dtype, device)
    }

    /// Returns the name of the weight, if this is the name that an adapted layer has for it.
    fn base_name(&self, name: &str) -> Option<String> {
        let layer = name.strip_suffix(Linear::BASE_WEIGHT)?;
        let [a, _] = matrix_names(layer.strip_suffix('.').unwrap_or(layer));
        self.inner.contains_tensor(&a).then(|| format!("{layer}{WEIGHT}"))
    }

    /// Returns the parameter, or its sum with the adapter if there is one.
    fn compose(&self, name: &str, parameter: Tensor) -> Result<Tensor> {
        let matrices = layer_of(name).map(matrix_names);
        let Some([a, b]) = matrices.filter(|[a, _]| self.inner.contains_tensor(a)) else {
            return Ok(parameter);
        };
        let dtype = parameter.dtype();
        let a = self.inner.get_unchecked_dtype(&a, dtype)?;
        let b = self.inner.get_unchecked_dtype(&b, dtype)?;
        add_adapter(&parameter, &a, &b, self.scale)
    }
}

impl SimpleBackend for AdapterComposer<'_> {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        _: &Device,
    ) -> Result<Tensor> {
        match self.base_name(name) {
            Some(weight) => {
                let dtype = self.base_dtype.unwrap_or(dtype);
                self.inner.get_with_hints_dtype(shape, &weight, init, dtype)
            }
            None => self.compose(name, self.inner.get_with_hints_dtype(shape, name, init, dtype)?),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        if name.ends_with(Linear::LORA_SCALE) {
            return Tensor::new(self.scale, &Device::Cpu);
        }
        self.compose(name, self.inner.get_unchecked_dtype(name, dtype)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.base_name(name).is_some() || self.inner.contains_tensor(name)
    }
}
