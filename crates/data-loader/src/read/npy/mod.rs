//! Rows of NumPy arrays, and windows over them.

pub(crate) mod dtype;
pub(crate) mod header;

use std::{marker::PhantomData, path::Path};

use crate::{
    dataset::Dataset,
    error::{BoxError, Error, NpyFault, Result},
    read::{
        file::DataFile,
        npy::{dtype::NpyElement, header::NpyHeader},
        rows::FileRows,
    },
};

/// The numbers of a sample, in C order.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NumberArray<T> {
    /// Numbers.
    pub values: Vec<T>,
    /// Sizes of the dimensions; empty for a single number.
    pub shape: Vec<usize>,
}

/// The rows of a NumPy array, or windows over them, read when they are asked for.
///
/// # Shapes
///
/// A row of an array of shape `[n, a, b]` has shape `[a, b]`. A window has shape `[length, a, b]`.
///
/// # Examples
///
/// Windows of 3 time steps, 2 steps apart, over a series of 2 features:
///
/// ```
/// use data_loader::{Dataset, NpyDataset, NpyDtype, NpyHeader};
///
/// # let folder = core_types::files::AtomicFolder::new(std::env::temp_dir().join("example"))?;
/// # let path = folder.path().join("series.npy");
/// let mut file = NpyHeader { dtype: NpyDtype::for_element::<f32>(), shape: vec![6, 2] }.to_bytes();
/// file.extend((0_u8..12).flat_map(|n| f32::from(n).to_le_bytes()));
/// std::fs::write(&path, file)?;
///
/// let windows = NpyDataset::<f32>::open(&path)?.windows(3, 2)?;
/// let window = windows.read(1)?;
/// assert_eq!((windows.len(), window.shape), (2, vec![3, 2]));
/// assert_eq!(window.values, [4., 5., 6., 7., 8., 9.]);
/// # Ok::<(), data_loader::BoxError>(())
/// ```
#[derive(Debug)]
pub struct NpyDataset<T> {
    rows: FileRows,
    row_shape: Vec<usize>,
    /// Whether the first dimension of a sample is the length of a window.
    has_windows: bool,
    element: PhantomData<fn() -> T>,
}

impl<T: NpyElement> NpyDataset<T> {
    /// Opens an array of exactly this type. Tensors convert, as in `stack(…)?.to_dtype(DType::F32)?`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], or [`Error::Npy`] if the file is not an array of this type in C order with at
    /// least one dimension, or has another length than the array.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let file = DataFile::open(path.as_ref())?;
        let mut source = file.reader_at(0);
        let header = NpyHeader::read(&mut source).map_err(|fault| npy_error(&file, fault))?;
        let data_start = source.position;
        let (n_rows, row_shape, row_bytes) = check_shape(&header, data_start, file.len())
            .map_err(|fault| npy_error(&file, fault))?;
        if header.dtype != T::DTYPE {
            let (found, expected) = (header.dtype.to_string(), T::DTYPE.to_string());
            return Err(npy_error(&file, NpyFault::DtypeMismatch { found, expected }));
        }
        let rows = FileRows::new(file, data_start, n_rows, row_bytes);
        Ok(Self { rows, row_shape, has_windows: false, element: PhantomData })
    }

    /// Makes each `length` neighboring rows a sample; samples begin `stride` rows apart.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a length or stride of 0.
    pub fn windows(self, length: u64, stride: u64) -> Result<Self> {
        Ok(Self { rows: self.rows.windows(length, stride)?, has_windows: true, ..self })
    }
}

fn npy_error(file: &DataFile, cause: NpyFault) -> Error {
    Error::Npy { path: file.path.clone(), cause }
}

/// Returns the number, the shape and the bytes of the rows.
fn check_shape(
    header: &NpyHeader,
    data_start: u64,
    n_file_bytes: u64,
) -> Result<(u64, Vec<usize>, u64), NpyFault> {
    let invalid = || {
        let shape = &header.shape;
        NpyFault::Invalid(format!("it has shape {shape:?}, which has no rows or too many bytes"))
    };
    let (&n_rows, row_sizes) = header.shape.split_first().ok_or_else(invalid)?;
    let row_shape = row_sizes.iter().map(|&size| usize::try_from(size));
    let row_shape = row_shape.collect::<Result<Vec<usize>, _>>().map_err(|_| invalid())?;
    let n_data_bytes = header.n_data_bytes().ok_or_else(invalid)?;
    let expected = data_start.checked_add(n_data_bytes).ok_or_else(invalid)?;
    if n_file_bytes != expected {
        let fault = format!("it has {n_file_bytes} bytes, its shape needs {expected}");
        return Err(NpyFault::Invalid(fault));
    }
    // Rows without numbers would be samples without bytes, of any number.
    let row_bytes = n_data_bytes.checked_div(n_rows).unwrap_or(0);
    if row_bytes == 0 && n_rows > 0 {
        return Err(invalid());
    }
    Ok((n_rows, row_shape, row_bytes))
}

impl<T: NpyElement> Dataset for NpyDataset<T> {
    type Item = NumberArray<T>;

    fn len(&self) -> u64 {
        self.rows.len()
    }

    fn read(&self, index: u64) -> Result<NumberArray<T>, BoxError> {
        let values = T::decode_all(&self.rows.read(index)?);
        let mut shape = self.row_shape.clone();
        if self.has_windows {
            shape.insert(0, usize::try_from(self.rows.length)?);
        }
        Ok(NumberArray { values, shape })
    }

    fn fingerprint(&self) -> Option<u64> {
        self.rows.fingerprint()
    }
}
