//! The examples run and print the expected output.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Runs an example that was built with this test, and returns its output.
fn output_of(example: &str) -> Result<String> {
    let this = std::env::current_exe()?;
    let built = this.ancestors().nth(2).context("no examples directory")?.join("examples");
    let mut program: PathBuf = built.join(example);
    program.set_extension(std::env::consts::EXE_EXTENSION);
    ensure!(program.exists(), "{} does not exist; build it with --examples", program.display());
    let output = Command::new(program).output()?;
    let (out, err) = (String::from_utf8(output.stdout)?, String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{example} failed: {out}{err}");
    Ok(out)
}

#[test]
fn hello_queue_prints_its_message_and_has_at_most_25_lines() -> Result<()> {
    assert_eq!(output_of("hello_queue")?, "received: hello, queue\n");
    assert!(include_str!("../examples/hello_queue.rs").lines().count() <= 25);
    Ok(())
}

#[test]
fn retry_and_dead_letter_delivers_every_payment() -> Result<()> {
    let expected = "\
        ada paid at attempt 1\n\
        bob paid at attempt 2\n\
        dead letter: eve: the bank is closed (attempt 3 of 3)\n\
        replayed: 1\n\
        eve paid at attempt 1\n";
    assert_eq!(output_of("retry_and_dead_letter")?, expected);
    Ok(())
}

#[test]
fn ordered_by_key_keeps_the_order_of_each_customer() -> Result<()> {
    let expected = "\
        ada: ordered, paid, shipped\n\
        bob: ordered, declined, paid, shipped\n\
        cleo: ordered, paid, shipped\n\
        dan: ordered, paid, shipped\n";
    assert_eq!(output_of("ordered_by_key")?, expected);
    Ok(())
}
