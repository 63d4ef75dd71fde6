//! Runs programs, and prints each command first, so that a person can repeat it.

use std::{
    env,
    error::Error,
    ffi::OsString,
    fmt, iter,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// The result of a command of this package; `main` prints its error.
pub(crate) type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// Returns the root of the workspace.
#[expect(clippy::expect_used, reason = "the path is this package's own, as cargo gave it")]
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is a folder in the root")
}

/// Returns the folder where pip installs programs for `.ci/tools`.
fn tools() -> PathBuf {
    root().join("target/tools/bin")
}

/// A call of a program in the root of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    program: String,
    args: Vec<String>,
    envs: Vec<(&'static str, OsString)>,
}

impl Call {
    /// Returns a call of `cargo` with `args`, separated by spaces.
    pub(crate) fn cargo(args: &str) -> Self {
        Self::new("cargo", args)
    }

    /// Returns a call of `program` with `args`, separated by spaces.
    pub(crate) fn new(program: impl Into<String>, args: &str) -> Self {
        let args = args.split_whitespace().map(str::to_owned).collect();
        Self { program: program.into(), args, envs: Vec::new() }
    }

    /// Adds one argument, spaces and all.
    pub(crate) fn arg(mut self, arg: impl Into<String>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets an environment variable of the call.
    pub(crate) fn env(mut self, key: &'static str, value: impl Into<OsString>) -> Self {
        self.envs.push((key, value.into()));
        self
    }

    /// Prints the command and runs it; its output goes where ours goes.
    pub(crate) fn run(&self) -> Result {
        println!("$ {self}");
        let status = self.command().status()?;
        if status.success() { Ok(()) } else { Err(format!("`{self}` failed: {status}").into()) }
    }

    /// Runs the command without printing it, and returns its output.
    pub(crate) fn read(&self) -> Result<String> {
        self.output_of(self.command().stderr(Stdio::piped()))
    }

    /// Prints the command, runs it and returns its output; its standard error goes where ours goes.
    pub(crate) fn run_and_read(&self) -> Result<String> {
        println!("$ {self}");
        self.output_of(self.command().stderr(Stdio::inherit()))
    }

    fn output_of(&self, command: &mut Command) -> Result<String> {
        let output = command.stdout(Stdio::piped()).spawn()?.wait_with_output()?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let reason =
                if stderr.is_empty() { output.status.to_string() } else { stderr.into_owned() };
            return Err(format!("`{self}` failed: {reason}").into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Returns true if the command succeeds, without printing it.
    pub(crate) fn succeeds(&self) -> bool {
        self.command().output().is_ok_and(|output| output.status.success())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.executable());
        command.current_dir(root()).stdin(Stdio::null()).args(&self.args);
        command.env("PATH", search_path()).envs(self.envs.iter().cloned());
        command
    }

    /// Returns the cargo that runs us for `cargo`, unless the call names a toolchain: only rustup's
    /// cargo, which a shell finds, understands `+nightly`.
    fn executable(&self) -> OsString {
        let names_toolchain = self.args.first().is_some_and(|arg| arg.starts_with('+'));
        let ours = env::var_os("CARGO").filter(|_| self.program == "cargo" && !names_toolchain);
        ours.unwrap_or_else(|| self.program.clone().into())
    }
}

/// Returns the search path of programs, with `tools` last: programs that a person installed go
/// first.
fn search_path() -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(iter::once(tools()));
    // A folder with a separator in its name cannot be listed; then our tools are left out.
    env::join_paths(folders).unwrap_or(path)
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in &self.envs {
            write!(f, "{key}={} ", quoted(&value.to_string_lossy()))?;
        }
        write!(f, "{}", quoted(&self.program))?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

/// Returns the word as a shell needs it.
fn quoted(word: &str) -> String {
    if !word.is_empty() && word.chars().all(|c: char| c.is_alphanumeric() || "-_=/.:,+".contains(c))
    {
        word.to_owned()
    } else {
        format!("'{word}'")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_command_is_quoted() {
        let call = Call::cargo("bench -p benches --").arg("a b").env("FLAGS", "-D warnings");
        assert_eq!(call.to_string(), "FLAGS='-D warnings' cargo bench -p benches -- 'a b'");
    }

    #[test]
    fn error_names_the_failed_command() {
        let error = Call::cargo("no-such-subcommand").read().unwrap_err().to_string();
        assert!(
            error.starts_with("`cargo no-such-subcommand` failed: error: no such command"),
            "{error}"
        );
    }
}
