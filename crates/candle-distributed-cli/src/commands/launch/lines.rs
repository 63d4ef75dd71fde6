//! What the processes print, line by line, each with the rank it is from.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};

/// The longest line that is passed on in one piece. Longer ones become several lines, so that a
/// process that never ends one does not fill the memory.
const MAX_LINE_BYTES: u64 = 1 << 20;

/// Writes the lines of `source` to `out` as they come, with the rank before each.
///
/// A line is written in one call, so lines of several ranks do not mix. Bytes are passed on as they
/// are, whatever text they are. If the reader of `out` goes away, `source` is closed, so that the
/// process notices as it would without a launcher.
pub(super) fn pass_on(rank: usize, source: impl Read, mut out: impl Write) -> io::Result<()> {
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

    fn passed_on(source: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        pass_on(7, source, &mut out).unwrap();
        out
    }

    #[test]
    fn every_line_begins_with_its_rank() {
        assert_eq!(passed_on(b""), b"");
        assert_eq!(passed_on(b"a\n\nb"), b"[7] a\n[7] \n[7] b\n");
        assert_eq!(passed_on(b"\xff\x00\r\n"), b"[7] \xff\x00\r\n");
    }

    #[test]
    fn lines_without_an_end_come_in_pieces() {
        let n_bytes = 1 << 20;
        let line = [vec![b'x'; n_bytes], b"yz\n".to_vec()].concat();
        let first = [b"[7] ".to_vec(), vec![b'x'; n_bytes], b"\n".to_vec()].concat();
        assert_eq!(passed_on(&line), [first, b"[7] yz\n".to_vec()].concat());
    }

    #[test]
    fn a_place_that_is_full_is_a_failure_and_a_reader_that_has_gone_is_none() {
        struct Broken(ErrorKind);

        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(self.0.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }

        let written = |kind| pass_on(0, &b"a\nb\n"[..], Broken(kind)).map_err(|error| error.kind());
        assert_eq!(written(ErrorKind::BrokenPipe), Ok(()));
        assert_eq!(written(ErrorKind::StorageFull), Err(ErrorKind::StorageFull));
    }
}
