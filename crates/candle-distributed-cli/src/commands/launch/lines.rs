//! Forwards the output of processes line by line, with the rank before each line.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};

/// The length limit of a forwarded line. Longer lines are split, so that an endless line does not
/// fill the memory.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Writes each line of `source` to `out` as soon as it is complete, with the rank before it.
///
/// A line is written in one call, so lines of several ranks do not mix. Bytes are not interpreted,
/// and need not be UTF-8. If the reader of `out` closes it, `source` is closed, so that the process
/// gets the same error as without a launcher.
pub(super) fn forward(rank: usize, source: impl Read, mut out: impl Write) -> io::Result<()> {
    let mut source = BufReader::new(source);
    let mut line = Vec::new();
    loop {
        line.clear();
        write!(line, "[{rank}] ")?;
        if (&mut source).take(MAX_LINE_BYTES).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        match out.write_all(&line).and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarded(source: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        forward(7, source, &mut out).unwrap();
        out
    }

    #[test]
    fn every_line_begins_with_its_rank() {
        assert_eq!(forwarded(b""), b"");
        assert_eq!(forwarded(b"a\n\nb"), b"[7] a\n[7] \n[7] b\n");
        assert_eq!(forwarded(b"\xff\x00\r\n"), b"[7] \xff\x00\r\n");
    }

    #[test]
    fn endless_lines_are_split() {
        let n_bytes = 1 << 20;
        let line = [vec![b'x'; n_bytes], b"yz\n".to_vec()].concat();
        let first = [b"[7] ".to_vec(), vec![b'x'; n_bytes], b"\n".to_vec()].concat();
        assert_eq!(forwarded(&line), [first, b"[7] yz\n".to_vec()].concat());
    }

    #[test]
    fn only_a_closed_pipe_is_ignored() {
        struct FailingWriter(ErrorKind);

        impl Write for FailingWriter {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let written =
            |kind| forward(0, &b"a\nb\n"[..], FailingWriter(kind)).map_err(|error| error.kind());
        assert_eq!(written(ErrorKind::BrokenPipe), Ok(()));
        assert_eq!(written(ErrorKind::StorageFull), Err(ErrorKind::StorageFull));
    }
}
