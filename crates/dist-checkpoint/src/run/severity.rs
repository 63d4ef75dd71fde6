//! The severity of an error: whether the checkpoint that it is about can be removed.

use std::io::ErrorKind;

use fsdp_plan::SourceError;

use crate::error::Error;

/// Why a checkpoint cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// Something is missing, or is not what was written: nothing is lost with it.
    Damage,
    /// It may be whole for somebody else: another run, another version of this crate, another
    /// model. It stays.
    Other,
    /// The system could not read it this time, which says nothing about it. Should that last, a
    /// person decides: the disk may be readable elsewhere, or the permissions may be wrong, and to
    /// train the steps since the checkpoint before it again costs more than an error does.
    Passing,
}

impl Severity {
    pub(super) fn of(error: &Error) -> Self {
        match error {
            Error::Io { cause, .. } => of_io(cause.kind()),
            Error::Header { cause, .. } if is_unreadable(cause) => Self::Passing,
            Error::Header { .. }
            | Error::Checksum { .. }
            | Error::NoChecksum { .. }
            | Error::Length { .. }
            | Error::Extent { .. } => Self::Damage,
            // Text that has no end, or is none. Other data may be those of another program.
            Error::Json { cause, .. } if cause.is_eof() || cause.is_syntax() => Self::Damage,
            _ => Self::Other,
        }
    }
}

fn of_io(kind: ErrorKind) -> Severity {
    match kind {
        ErrorKind::NotFound | ErrorKind::UnexpectedEof => Severity::Damage,
        // What is there is no file, and will be none the next time.
        ErrorKind::InvalidInput | ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
            Severity::Other
        }
        _ => Severity::Passing,
    }
}

/// Whether the system failed while a header was read.
fn is_unreadable(cause: &fsdp_plan::Error) -> bool {
    matches!(cause, fsdp_plan::Error::Source(SourceError::Unreadable { .. }))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::disk::At;

    #[test]
    fn only_what_is_missing_or_cut_is_damage_to_the_system() {
        for (kind, expected) in [
            (ErrorKind::NotFound, Severity::Damage),
            (ErrorKind::UnexpectedEof, Severity::Damage),
            (ErrorKind::IsADirectory, Severity::Other),
            (ErrorKind::PermissionDenied, Severity::Passing),
            (ErrorKind::StaleNetworkFileHandle, Severity::Passing),
            (ErrorKind::Other, Severity::Passing),
        ] {
            let error = Err::<(), _>(io::Error::from(kind)).at("index.json".as_ref()).unwrap_err();
            assert_eq!(Severity::of(&error), expected, "{kind}");
        }
    }

    #[test]
    fn whole_checkpoints_of_others_are_not_damaged() {
        let path = || "step-0000000004".into();
        let run = Error::RunMismatch { path: path(), found: "a".into(), expected: "b".into() };
        let version = Error::FormatVersion { path: path(), found: 2, supported: 1 };
        for error in [run, version, Error::Renamed { path: path(), step: 4 }] {
            assert_eq!(Severity::of(&error), Severity::Other);
        }
    }
}
