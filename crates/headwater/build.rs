//! Lets programs of this package find the DuckDB library next to themselves, wherever they are moved.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_ANALYTICS").is_none() {
        return;
    }
    // Next to the program or in the `lib` beside its `bin`; tests and examples are one directory below. The build of
    // `headwater-analytics` puts the library there.
    let macos = std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "macos");
    let here = if macos { "@loader_path" } else { "$ORIGIN" };
    for folder in ["", "/../lib", "/.."] {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{here}{folder}");
    }
}
