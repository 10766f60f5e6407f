//! `headwater completion`: prints a shell completion script.

use crate::cli::completion;
use crate::cli::output;
use crate::exit::CliError;

/// Print a shell completion script. It asks this program for completions, so that names of topics, groups and tickets
/// are completed as well.
#[derive(Debug, clap::Args)]
pub(crate) struct CompletionArgs {
    /// Shell.
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

impl CompletionArgs {
    pub(in crate::cli) fn run(&self) -> Result<(), CliError> {
        output::exact(completion::script(&self.shell)?.trim_end())
    }
}
