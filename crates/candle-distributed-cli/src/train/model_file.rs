//! The model that a run ends with: a safetensors file, written and read a part at a time.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

use candle_core::Tensor;
use candle_distributed::{plan::ParameterInfo, types::Fingerprint};
use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};

use crate::train::precision::Precision;

/// The name of the model in the folder of its run.
pub(crate) const FILE: &str = "model.safetensors";

/// The model of the run in a folder, once it has ended.
pub(crate) fn in_folder(path: &Path) -> PathBuf {
    path.join(FILE)
}

/// Writes the head of the file: names and shapes of the parameters, which follow in this order.
pub(crate) fn write_head(
    out: &mut impl Write,
    parameters: &[ParameterInfo],
    precision: Precision,
) -> io::Result<()> {
    let dtype = match precision {
        Precision::F32 => Dtype::F32,
        Precision::Bf16 => Dtype::BF16,
    };
    let mut offset = 0;
    let mut infos = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        let shape: Result<Vec<usize>, _> =
            parameter.shape().iter().map(|&size| usize::try_from(size)).collect();
        let shape = shape.map_err(io::Error::other)?;
        let end = offset + shape.iter().product::<usize>() * precision.dtype().size_in_bytes();
        let data_offsets = (offset, end);
        infos.push((parameter.name().to_owned(), TensorInfo { dtype, shape, data_offsets }));
        offset = end;
    }
    let metadata = Metadata::new(None, infos).map_err(io::Error::other)?;
    let mut head = serde_json::to_vec(&metadata)?;
    // The format has the items begin at a multiple of eight bytes.
    head.resize(head.len().next_multiple_of(size_of::<u64>()), b' ');
    out.write_all(&(head.len() as u64).to_le_bytes())?;
    out.write_all(&head)
}

/// Writes the items of the next parameter.
pub(crate) fn write_items(
    out: &mut impl Write,
    parameter: &Tensor,
    precision: Precision,
) -> io::Result<()> {
    let parameter = parameter.to_dtype(precision.dtype()).map_err(io::Error::other)?;
    parameter.write_bytes(out).map_err(io::Error::other)
}

/// The names of the files in the folder of a model; none of a model that is a file.
pub(crate) fn names_in(path: &Path) -> io::Result<Vec<String>> {
    if !path.is_dir() {
        return Ok(Vec::new());
    }
    let name = |entry: io::Result<fs::DirEntry>| {
        let name = entry?.file_name().into_string();
        name.map_err(|name| io::Error::other(format!("{} is not UTF-8", name.display())))
    };
    let mut names: Vec<String> = fs::read_dir(path)?.map(name).collect::<io::Result<_>>()?;
    names.sort();
    Ok(names)
}

/// The fingerprint of a model: that of its file, or of these files of its folder.
pub(crate) fn fingerprint_of_model(path: &Path, names: &[String]) -> io::Result<String> {
    if !path.is_dir() {
        return fingerprint(path);
    }
    let mut all = Fingerprint::new();
    for name in names {
        all.bytes(name.as_bytes());
        all.bytes(fingerprint(&path.join(name))?.as_bytes());
    }
    Ok(format!("{:016x}", all.finish()))
}

/// The fingerprint of the bytes of a file, in hexadecimal digits.
pub(crate) fn fingerprint(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    let len = file.metadata()?.len();
    of_bytes(len, file)
}

/// The fingerprint of so many bytes.
fn of_bytes(len: u64, mut bytes: impl Read) -> io::Result<String> {
    /// A number of words that is read at a time.
    const PART: usize = 1 << 17;
    let mut fingerprint = Fingerprint::new();
    fingerprint.word(len);
    let mut part = Vec::with_capacity(PART * size_of::<u64>());
    loop {
        part.clear();
        let read = bytes.by_ref().take((PART * size_of::<u64>()) as u64).read_to_end(&mut part)?;
        if read == 0 {
            return Ok(format!("{:016x}", fingerprint.finish()));
        }
        for chunk in part.chunks(size_of::<u64>()) {
            let mut word = [0; size_of::<u64>()];
            word[..chunk.len()].copy_from_slice(chunk);
            fingerprint.word(u64::from_le_bytes(word));
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_distributed::plan::ElemType;

    use super::*;

    #[test]
    fn the_file_is_the_one_that_safetensors_writes() {
        let tensors = [
            ("a.weight", Tensor::arange(0_f32, 6., &Device::Cpu).unwrap().reshape((2, 3)).unwrap()),
            ("b.weight", Tensor::new(&[7_f32], &Device::Cpu).unwrap()),
            ("c", Tensor::zeros((0, 4), candle_core::DType::F32, &Device::Cpu).unwrap()),
        ];
        let infos = tensors.iter().map(|(name, tensor)| {
            let shape = tensor.dims().iter().map(|&size| size as u64);
            ParameterInfo::new(*name, shape.collect::<Vec<_>>(), ElemType::F32).unwrap()
        });
        let mut written = Vec::new();
        let precision = Precision::F32;
        write_head(&mut written, &infos.collect::<Vec<_>>(), precision).unwrap();
        for (_, tensor) in &tensors {
            write_items(&mut written, tensor, precision).unwrap();
        }
        let tensors = tensors.iter().map(|(name, tensor)| (name, tensor));
        assert_eq!(written, safetensors::serialize(tensors, None).unwrap());
    }

    #[test]
    fn a_fingerprint_does_not_depend_on_the_parts_that_are_read() {
        for len in [0, 1, 8, 9, 8 << 17, (8 << 17) + 3, (16 << 17) + 8] {
            let bytes: Vec<u8> = (0..len).map(|n: u32| n.to_le_bytes()[0] ^ 0x5a).collect();
            let whole = format!("{:016x}", Fingerprint::new().bytes(&bytes).finish());
            assert_eq!(of_bytes(bytes.len() as u64, &bytes[..]).unwrap(), whole, "{len}");
        }
    }
}
