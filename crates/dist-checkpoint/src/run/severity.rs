//! The severity of an error: whether its checkpoint can be removed.

use std::io::ErrorKind;

use fsdp_plan::SourceError;

use crate::error::Error;

/// The reason why a checkpoint cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// A part is missing or changed: nothing is lost by removing the checkpoint.
    Damage,
    /// The checkpoint may be valid for another run, another version of this crate, or another
    /// model. It stays.
    Other,
    /// The system failed to read it, so its content is unknown. If this persists, the user must
    /// decide: the disk may be readable elsewhere, or the permissions may be wrong. Training the
    /// lost steps again would cost more than an error.
    Transient,
}

impl Severity {
    pub(super) fn from_error(error: &Error) -> Self {
        match error {
            Error::Io { cause, .. } => io_severity(cause.kind()),
            Error::Header { cause, .. } if is_unreadable(cause) => Self::Transient,
            Error::Header { .. } | Error::Damaged { .. } => Self::Damage,
            // The text is truncated or not JSON. Other data may belong to another program.
            Error::Json { cause, .. } if cause.is_eof() || cause.is_syntax() => Self::Damage,
            _ => Self::Other,
        }
    }
}

fn io_severity(kind: ErrorKind) -> Severity {
    match kind {
        ErrorKind::NotFound | ErrorKind::UnexpectedEof => Severity::Damage,
        // The path is not a file, and retrying does not help.
        ErrorKind::InvalidInput | ErrorKind::IsADirectory | ErrorKind::NotADirectory => {
            Severity::Other
        }
        _ => Severity::Transient,
    }
}

/// Returns true if the system failed while reading a header.
fn is_unreadable(cause: &fsdp_plan::Error) -> bool {
    matches!(cause, fsdp_plan::Error::Source(SourceError::Unreadable { .. }))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::disk::AtPath;

    #[test]
    fn only_missing_or_truncated_is_damage() {
        for (kind, expected) in [
            (ErrorKind::NotFound, Severity::Damage),
            (ErrorKind::UnexpectedEof, Severity::Damage),
            (ErrorKind::IsADirectory, Severity::Other),
            (ErrorKind::PermissionDenied, Severity::Transient),
            (ErrorKind::StaleNetworkFileHandle, Severity::Transient),
            (ErrorKind::Other, Severity::Transient),
        ] {
            let error = Err::<(), _>(io::Error::from(kind)).at("index.json".as_ref()).unwrap_err();
            assert_eq!(Severity::from_error(&error), expected, "{kind}");
        }
    }

    #[test]
    fn foreign_checkpoints_are_not_damage() {
        let path = std::path::Path::new("step-0000000004");
        let cause = serde_json::from_str::<u8>("\"text\"").unwrap_err();
        let other_type = Error::Json { path: path.into(), cause };
        for error in [Error::unsuitable(path, "of another run"), other_type] {
            assert_eq!(Severity::from_error(&error), Severity::Other);
        }
    }
}
