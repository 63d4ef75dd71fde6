//! Readable JSON: one line per field, and per entry of a field.

use std::io::{Result, Write};

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Serializes `value` with line breaks down to the entries of its fields, and none below.
pub(crate) fn json_lines(value: &impl Serialize) -> String {
    let mut json = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut json, JsonLines::default())).unwrap();
    String::from_utf8(json).unwrap()
}

#[derive(Default)]
struct JsonLines {
    depth: usize,
}

impl JsonLines {
    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> Result<()> {
        self.depth += 1;
        writer.write_all(bracket)
    }

    fn entry<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        writer.write_all(if first { b"" } else { b"," })?;
        self.line_break(writer)
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> Result<()> {
        let is_broken = self.depth <= 2;
        self.depth -= 1;
        if is_broken {
            self.line_break(writer)?;
        }
        writer.write_all(bracket)
    }

    fn line_break<W: ?Sized + Write>(&self, writer: &mut W) -> Result<()> {
        if self.depth <= 2 { write!(writer, "\n{}", "  ".repeat(self.depth)) } else { Ok(()) }
    }
}

impl Formatter for JsonLines {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.begin(writer, b"[")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        self.entry(writer, first)
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.end(writer, b"]")
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.begin(writer, b"{")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        self.entry(writer, first)
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.end(writer, b"}")
    }
}
