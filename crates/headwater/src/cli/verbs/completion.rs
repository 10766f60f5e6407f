//! `headwater completion`: prints a shell completion script.

use clap_complete::Shell;

use crate::exit::CliError;

/// Print a shell completion script.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// Shell.
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

impl CompletionArgs {
    pub(in crate::cli) fn run(&self) -> Result<(), CliError> {
        let shell = match self.shell.as_str() {
            "zsh" => Shell::Zsh,
            "fish" => Shell::Fish,
            _ => Shell::Bash,
        };
        let mut script = Vec::new();
        clap_complete::generate(
            shell,
            &mut crate::cli::args::definition(),
            "headwater",
            &mut script,
        );
        crate::cli::output::exact(String::from_utf8_lossy(&script).trim_end())
    }
}
