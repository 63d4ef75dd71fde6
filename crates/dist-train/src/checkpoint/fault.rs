//! What an error says about a checkpoint: whether anybody could still miss it.

use std::io::ErrorKind;

use fsdp_plan::SourceError;

use crate::error::{Error, checkpoint::CheckpointError};

/// Why a checkpoint cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
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

impl Fault {
    pub(super) fn of(error: &Error) -> Self {
        let Error::Checkpoint(error) = error else { return Self::Other };
        match error {
            CheckpointError::Io { cause, .. } => of_io(cause.kind()),
            CheckpointError::Header { cause, .. } if is_unreadable(cause) => Self::Passing,
            CheckpointError::Header { .. }
            | CheckpointError::Checksum { .. }
            | CheckpointError::NoChecksum { .. }
            | CheckpointError::Length { .. }
            | CheckpointError::Extent { .. } => Self::Damage,
            // Text that has no end, or is none. Other data may be those of another program.
            CheckpointError::Json { cause, .. } if cause.is_eof() || cause.is_syntax() => {
                Self::Damage
            }
            _ => Self::Other,
        }
    }
}

fn of_io(kind: ErrorKind) -> Fault {
    match kind {
        ErrorKind::NotFound | ErrorKind::UnexpectedEof => Fault::Damage,
        // What is there is no file, and will be none the next time.
        ErrorKind::InvalidInput | ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
            Fault::Other
        }
        _ => Fault::Passing,
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
    use crate::checkpoint::disk::At;

    #[test]
    fn only_what_is_missing_or_cut_is_damage_to_the_system() {
        for (kind, expected) in [
            (ErrorKind::NotFound, Fault::Damage),
            (ErrorKind::UnexpectedEof, Fault::Damage),
            (ErrorKind::IsADirectory, Fault::Other),
            (ErrorKind::PermissionDenied, Fault::Passing),
            (ErrorKind::StaleNetworkFileHandle, Fault::Passing),
            (ErrorKind::Other, Fault::Passing),
        ] {
            let error = Err::<(), _>(io::Error::from(kind)).at("index.json".as_ref()).unwrap_err();
            assert_eq!(Fault::of(&error), expected, "{kind}");
        }
    }

    #[test]
    fn whole_checkpoints_of_others_are_not_damaged() {
        let path = || "step-0000000004".into();
        let run =
            CheckpointError::OtherRun { path: path(), found: "a".into(), expected: "b".into() };
        let version = CheckpointError::FormatVersion { path: path(), found: 3, supported: 2 };
        for error in [run, version, CheckpointError::Renamed { path: path(), step: 4 }] {
            assert_eq!(Fault::of(&error.into()), Fault::Other);
        }
    }
}
