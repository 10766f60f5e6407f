//! `headwater completion`: what a shell needs to complete our words.

use clap_complete::Shell;

use crate::exit::Failure;

/// Prints a script for a shell.
#[derive(Debug, clap::Args)]
pub(crate) struct Completion {
    /// The shell.
    #[arg(value_parser = ["bash", "zsh", "fish"])]
    shell: String,
}

impl Completion {
    pub(in crate::cli) fn run(&self) -> Result<(), Failure> {
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
