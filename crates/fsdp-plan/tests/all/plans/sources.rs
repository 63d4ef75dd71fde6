//! Readers of parameter lists, with valid and hostile input.

use std::io::{self, Read};

use fsdp_plan::{
    ElemType, Error, ParameterInfo, Result, SourceError,
    source::{from_index, from_manifest, from_safetensors},
    support::{MAX_HEADER_LEN, SafetensorsHeader, header_len},
};

use crate::plans::inputs::gpt2;

/// Builds the start of a safetensors file with this header.
fn safetensors(header: &str) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()
}

fn read(header: &str) -> Result<Vec<ParameterInfo>> {
    from_safetensors(&safetensors(header))
}

fn names(parameters: &[ParameterInfo]) -> Vec<&str> {
    parameters.iter().map(ParameterInfo::name).collect()
}

/// Reads a file without tensors.
#[expect(clippy::unnecessary_wraps, reason = "the signature of a file reader")]
fn no_parameters(_: &str) -> Result<Vec<ParameterInfo>> {
    Ok(Vec::new())
}

#[test]
fn manifest_keeps_text_order() {
    let parameters = gpt2();
    assert_eq!(names(&parameters)[..3], ["wte.weight", "wpe.weight", "h.0.ln_1.weight"]);
    assert_eq!(parameters.len(), 148);
    assert_eq!(parameters.iter().map(ParameterInfo::numel).sum::<u64>(), 124_439_808);
}

#[test]
fn header_keeps_file_order() {
    let header = r#"{"__metadata__": {"format": "pt", "deep": [[{}]]},
        "second": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
        "empty": {"dtype": "I64", "shape": [0], "data_offsets": [8, 8]},
        "first": {"dtype": "F64", "shape": [], "data_offsets": [0, 8], "extra": null}}"#;
    let parameters = read(header).unwrap();
    assert_eq!(names(&parameters), ["first", "empty", "second"]);
    assert_eq!(parameters[2].dtype(), ElemType::Bf16);
    assert_eq!(
        parameters.iter().map(ParameterInfo::requires_grad).collect::<Vec<_>>(),
        [true, false, true]
    );
}

#[test]
fn tensor_data_is_ignored() {
    let header = r#"{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}"#;
    let file = [safetensors(header), vec![0xff; 3]].concat();
    assert_eq!(from_safetensors(&file), read(header));
    assert_eq!(header_len(*file.first_chunk().unwrap()), Ok(header.len() as u64));
}

/// Checks that a header is rejected, and that the error names these numbers.
fn rejects_header<T: std::fmt::Debug>(result: Result<T>, numbers: &[u64]) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Source(SourceError::Header { .. })), "{error:?}");
    assert!(numbers.iter().all(|n| error.to_string().contains(&n.to_string())), "{error}");
}

/// Checks that an index is rejected, and that the error has these words.
fn rejects_index<T: std::fmt::Debug>(result: Result<T>, words: &[&str]) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Source(SourceError::Index { .. })), "{error:?}");
    assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
}

#[test]
fn truncated_files_are_rejected() {
    let file = safetensors("{}");
    for (len, needed) in [(5, 8), (9, 10)] {
        rejects_header(from_safetensors(&file[..len]), &[needed, len as u64]);
    }
    assert_eq!(from_safetensors(&file), Ok(Vec::new()));
}

#[test]
fn hostile_lengths_allocate_nothing() {
    for len in [MAX_HEADER_LEN + 1, u64::MAX] {
        rejects_header(header_len(len.to_le_bytes()), &[len, MAX_HEADER_LEN]);
        rejects_header(from_safetensors(&len.to_le_bytes()), &[len, MAX_HEADER_LEN]);
    }
    rejects_header(from_safetensors(&MAX_HEADER_LEN.to_le_bytes()), &[MAX_HEADER_LEN + 8, 8]);
    let pointer = from_safetensors(b"version https://git-lfs.github.com/spec/v1\n").unwrap_err();
    assert!(pointer.to_string().contains("`git lfs pull`"), "{pointer}");
}

#[test]
fn tensors_must_be_contiguous() {
    for (begin, end) in [(0, 4), (0, 12), (4, 12), (8, 0), (0, u64::MAX)] {
        let header = format!(
            r#"{{"a": {{"dtype": "F32", "shape": [2], "data_offsets": [{begin}, {end}]}}}}"#
        );
        rejects_header(read(&header), &[begin, end, 0, 8]);
    }
    let overlap = r#"{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}"#;
    rejects_header(read(overlap), &[2, 6, 4, 8]);
    let late_start = overlap.replace("[2, 6]", "[3, 8]");
    rejects_header(read(&late_start), &[3, 8, 4, 8]);
}

#[test]
fn malformed_json_reports_its_position() {
    let deep = "[".repeat(10_000);
    let header_of = |shape: &str| {
        format!(r#"{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}"#)
    };
    for header in [
        "",
        "null",
        "[]",
        "{",
        r#"{"a": 1}"#,
        r#"{"a": {"dtype": "F32"}}"#,
        r#"{"a": {"dtype": "F32", "dtype": "F32", "shape": [], "data_offsets": [0, 4]}}"#,
        &header_of("[-1]"),
        &header_of("[1.5]"),
        &header_of("[18446744073709551616]"),
        &header_of(&deep),
        &format!(r#"{{"__metadata__": {deep}"#),
        "{\"\u{0}\": 0}",
    ] {
        assert!(
            matches!(
                read(header),
                Err(Error::Source(SourceError::Malformed { what: "safetensors header", .. }))
            ),
            "{header:.60}"
        );
        assert!(
            matches!(
                from_manifest(header),
                Err(Error::Source(SourceError::Malformed { what: "manifest", .. }))
            ),
            "{header:.60}"
        );
        assert!(
            matches!(
                from_index(header, no_parameters),
                Err(Error::Source(SourceError::Malformed { what: "safetensors index", .. }))
            ),
            "{header:.60}"
        );
    }
    let error = from_manifest("{\n  \"a\": 1}").unwrap_err().to_string();
    assert!(error.ends_with("at line 2 column 8"), "{error}");
}

#[test]
fn header_has_ranges_and_file_length() {
    let header = r#"{"b": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}, "__metadata__": {"step": "7"}}"#;
    let bytes = safetensors(header);
    let data_start = bytes.len() as u64;
    let parsed = SafetensorsHeader::parse(&bytes).unwrap();
    let places: Vec<_> =
        parsed.tensors.iter().map(|tensor| (tensor.info.name(), tensor.range.clone())).collect();
    assert_eq!(places, [("a", data_start..data_start + 3), ("b", data_start + 3..data_start + 11)]);
    assert_eq!(parsed.file_len, data_start + 11);
    assert_eq!(
        parsed.metadata().unwrap().iter().collect::<Vec<_>>(),
        [(&"step".into(), &"7".into())]
    );
    // The reader stops at the end of the header.
    let mut file = bytes.as_slice().chain(&[0; 11][..]);
    assert_eq!(SafetensorsHeader::read(&mut file), Ok(parsed));
    assert_eq!(file.bytes().count(), 11);
}

#[test]
fn metadata_must_be_strings() {
    let metadata =
        |header: &str| SafetensorsHeader::parse(&safetensors(header)).unwrap().metadata().cloned();
    assert_eq!(metadata("{}").map(|texts| texts.len()), Ok(0));
    for header in [
        r#"{"__metadata__": {"step": 7}}"#,
        r#"{"__metadata__": ["step"]}"#,
        r#"{"__metadata__": null}"#,
        r#"{"__metadata__": {"step": "7"}, "__metadata__": {"step": "8"}}"#,
    ] {
        assert!(
            matches!(
                metadata(header),
                Err(Error::Source(SourceError::Malformed { what: "safetensors header", .. }))
            ),
            "{header}"
        );
    }
}

#[test]
fn failing_readers_are_errors() {
    struct Failing;

    impl Read for Failing {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }

    let error = SafetensorsHeader::read(Failing).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Source(SourceError::Unreadable { kind: io::ErrorKind::PermissionDenied, .. })
        ),
        "{error}"
    );
    let bytes = safetensors("{}");
    for len in 0..bytes.len() {
        let needed = if len < 8 { 8 } else { 10 };
        rejects_header(SafetensorsHeader::read(&bytes[..len]), &[needed, len as u64]);
    }
}

#[test]
fn offsets_beyond_64_bits_are_rejected() {
    let header = r#"{"a": {"dtype": "U8", "shape": [18446744073709551615], "data_offsets": [0, 18446744073709551615]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [18446744073709551615, 18446744073709551615]}}"#;
    assert_eq!(
        read(header),
        Err(Error::TotalTooLarge { what: "the bytes of the tensors of a file" })
    );
}

#[test]
fn duplicate_tensors_are_rejected() {
    let twice = Error::InvalidParameter { name: "a".into(), reason: "is listed twice".into() };
    let entry = r#""a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}"#;
    assert_eq!(read(&format!("{{{entry}, {entry}}}")), Err(twice.clone()));
    assert_eq!(from_manifest(&format!("{{{entry}, {entry}}}")), Err(twice.clone()));
    let index = r#"{"weight_map": {"a": "x", "a": "y"}}"#;
    assert_eq!(from_index(index, no_parameters), Err(twice));
}

#[test]
fn unknown_dtypes_are_named() {
    let error = from_manifest(r#"{"a": {"dtype": "Q3_X", "shape": [1]}}"#).unwrap_err();
    assert_eq!(error, Error::UnknownDtype { name: "a".into(), dtype: "Q3_X".into() });
    assert_eq!(error.to_string(), r#"tensor a has unknown dtype "Q3_X""#);
}

#[test]
fn overflowing_shapes_are_rejected() {
    for shape in [vec![u64::MAX, 2], vec![1 << 62], vec![1 << 40, 0, 1 << 40]] {
        let reason = format!("of shape {shape:?} and dtype F32 exceeds {} bytes", u64::MAX);
        let error = Error::InvalidParameter { name: "a".into(), reason };
        assert_eq!(ParameterInfo::new("a", shape.clone(), ElemType::F32), Err(error.clone()));
        assert_eq!(
            from_manifest(&format!(r#"{{"a": {{"dtype": "F32", "shape": {shape:?}}}}}"#)),
            Err(error)
        );
    }
    let largest = ParameterInfo::new("a", [u64::MAX], ElemType::U8).unwrap();
    assert_eq!((largest.numel(), largest.bytes()), (u64::MAX, u64::MAX));
}

#[test]
fn index_files_are_read_once() {
    let json = r#"{"metadata": {"total_size": 1}, "weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}}"#;
    let mut files = Vec::new();
    let read = from_index(json, |file| {
        files.push(file.to_owned());
        no_parameters(file)
    });
    rejects_index(read, &["tensor a", "1.safetensors"]);
    assert_eq!(files, ["1.safetensors", "2.safetensors"]);
    for file in ["", "..", "../x", "/etc/passwd", "a\\b", "C:x"] {
        let json = serde_json::json!({ "weight_map": { "a": file } }).to_string();
        rejects_index(from_index(&json, no_parameters), &[&format!("{file:?}")]);
    }
}

#[test]
fn index_must_match_its_files() {
    let json = r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#;
    let read = |first_names: &'static [&'static str]| {
        from_index(json, move |file| {
            let names = if file == "1.safetensors" { first_names } else { &["b"] };
            names
                .iter()
                .map(|name| ParameterInfo::new(*name, [2], ElemType::F32))
                .collect::<Result<Vec<_>, Error>>()
        })
    };
    let names: Vec<String> = read(&["a"]).unwrap().iter().map(|info| info.name().into()).collect();
    assert_eq!(names, ["a", "b"]);
    for (names, missing) in
        [(&[][..], "tensor a"), (&["a", "c"], "tensor c"), (&["a", "b"], "tensor b")]
    {
        rejects_index(read(names), &[missing, "1.safetensors"]);
    }
}
