//! Hostile texts, and how to insert them into requests.

use serde_json::Value;

/// SQL, HTML, templates, paths, control characters, and empty and long texts.
pub(crate) fn hostile_texts() -> Vec<String> {
    let texts = [
        "'; DROP TABLE tickets; --",
        "<script>alert(1)</script><img src=x onerror=alert(1)>",
        "\" OR 1=1 /*",
        "../../../etc/passwd",
        "{{7*7}}${7*7}%s%n",
        "a\u{202e}b\u{0}c\r\nset-cookie: x=y",
        "",
        "-1",
        "99999999999999999999999999",
        "键😀",
    ];
    let long = "x".repeat(2000);
    texts.into_iter().map(str::to_owned).chain([long]).collect()
}

/// Percent-encodes a text.
pub(crate) fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// Copies of a body, each with one text replaced.
pub(crate) fn with_text(value: &Value, text: &str) -> Vec<Value> {
    match value {
        Value::String(_) => vec![text.into()],
        Value::Array(items) => (0..items.len())
            .flat_map(|index| {
                with_text(&items[index], text).into_iter().map(move |new| (index, new))
            })
            .map(|(index, new)| {
                let mut items = items.clone();
                items[index] = new;
                items.into()
            })
            .collect(),
        Value::Object(fields) => fields
            .iter()
            .flat_map(|(name, inner)| {
                with_text(inner, text).into_iter().map(move |new| (name.clone(), new))
            })
            .map(|(name, new)| {
                let mut fields = fields.clone();
                fields.insert(name, new);
                fields.into()
            })
            .collect(),
        _ => Vec::new(),
    }
}
