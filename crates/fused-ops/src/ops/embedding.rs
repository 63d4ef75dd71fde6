//! Rows of a table, selected by index.
//!
//! On the CPU, the operation checks the indices, and then calls candle's selection of rows. candle's
//! backward writes only the selected rows into the gradient of the table. A custom operation would
//! return a gradient of all rows, which took twice as long for 32,000 rows. So only tables in half
//! precision have one: a row's gradients must be added in single precision, and a wide copy of the
//! table would take more memory.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor};

use crate::{
    autograd::{Backward, record_tensor},
    composed,
    error::{Error, Result},
    route::Route,
};

const OP: &str = "embedding";

/// Returns the rows of `table` at `indices`.
///
/// # Shapes
///
/// `table` [rows, width], `indices` of any shape and of type u8, u32 or i64; the result is [..,
/// width].
///
/// # Determinism
///
/// The same bits on every processor and for any number of threads: the gradients of a row are added
/// in the order of the indices.
///
/// # Errors
///
/// [`OutOfRange`](Error::OutOfRange) if the table has no such row, [`Shape`](Error::Shape) if the table does
/// not have two dimensions, [`DType`](Error::DType) if the indices are not integers or the table
/// has no floating type, [`Device`](Error::Device) if the two are on different devices. Only on the
/// processor are the indices checked before the rows are selected.
///
/// # Examples
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let table = Var::new(&[[0.0_f32, 1.0], [2.0, 3.0], [4.0, 5.0]], &Device::Cpu)?;
/// let indices = Tensor::new(&[2_u32, 0, 2], &Device::Cpu)?;
/// let y = fused_ops::embedding(&table, &indices)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]);
///
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.get(&table).unwrap().to_vec2::<f32>()?, [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn embedding(table: &Tensor, indices: &Tensor) -> Result<Tensor> {
    if table.rank() != 2 {
        let expected = "[rows, width]".to_owned();
        return Err(Error::Shape {
            op: OP,
            input: "table",
            found: table.dims().to_vec(),
            expected,
        });
    }
    let device = table.device().location();
    let other_device = indices.device().location();
    if device != other_device {
        return Err(Error::Device { op: OP, first: device, other: other_device });
    }
    let limit = table.dims()[0];
    let mut rows = Vec::new();
    if table.device().is_cpu() {
        for (position, index) in read_integers(OP, "indices", indices)?.into_iter().enumerate() {
            rows.push(check_index(OP, index, position, limit)?);
        }
    }
    match Route::new(OP, &[("table", table)])? {
        Route::Half(_) if table.track_op() => {
            record_tensor(&[table], &select_rows(&table.detach(), indices)?, HalfTable { rows })
        }
        Route::F32 | Route::F64 | Route::Half(_) => Ok(select_rows(table, indices)?),
        Route::Composed => composed::embedding(table, indices),
    }
}

/// Selects rows, with candle's backward.
fn select_rows(table: &Tensor, indices: &Tensor) -> candle_core::Result<Tensor> {
    let shape = [indices.dims(), &table.dims()[1..]].concat();
    table.contiguous()?.index_select(&indices.flatten_all()?, 0)?.reshape(shape)
}

/// The backward of rows that were selected from a table in half precision.
struct HalfTable {
    /// The selected rows.
    rows: Vec<usize>,
}

impl Backward for HalfTable {
    const NAME: &'static str = "fused-embedding";

    fn backward(
        &self,
        inputs: &[&Tensor],
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<Vec<Option<Tensor>>> {
        let table = inputs[0];
        let grad = grad.reshape((self.rows.len(), table.dims()[1]))?;
        let mut uses = BTreeMap::<_, Vec<u32>>::new();
        for (position, &row) in (0..).zip(&self.rows) {
            uses.entry(row).or_default().push(position);
        }
        let sum = table.zeros_like()?.detach();
        for (row, positions) in uses {
            let positions = Tensor::new(positions, grad.device())?;
            let grads = grad.index_select(&positions, 0)?.to_dtype(DType::F32)?;
            sum.slice_set(&grads.sum_keepdim(0)?.to_dtype(sum.dtype())?, 0, row)?;
        }
        Ok(vec![Some(sum)])
    }
}

/// Returns the integers of a tensor, in order.
pub(crate) fn read_integers(
    op: &'static str,
    input: &'static str,
    tensor: &Tensor,
) -> Result<Vec<i64>> {
    match tensor.dtype() {
        DType::U8 | DType::U32 | DType::I64 => {
            Ok(tensor.flatten_all()?.to_dtype(DType::I64)?.to_vec1()?)
        }
        found => Err(Error::DType { op, input, found, expected: "u8, u32 or i64" }),
    }
}

/// Returns `index` if it is at least 0 and below `limit`.
pub(crate) fn check_index(
    op: &'static str,
    index: i64,
    position: usize,
    limit: usize,
) -> Result<usize> {
    let checked = usize::try_from(index).ok().filter(|&index| index < limit);
    checked.ok_or_else(|| {
        let name = format!("the index at position {position}");
        Error::out_of_range(op, name, &index, format!("at least 0 and below {limit}"))
    })
}
