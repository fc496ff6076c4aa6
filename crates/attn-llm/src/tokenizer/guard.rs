//! A guard before the crate tokenizers: what it would panic or abort on in a damaged `tokenizer.json` is refused, and panics become errors.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;

/// Calls the crate tokenizers, which panics on some files and texts; a panic is an error with its sentence.
pub(super) fn guarded<T, E: ToString>(call: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    // A tokenizer keeps nothing between calls but a cache of words, which forgets what it could not finish.
    let called = catch_unwind(AssertUnwindSafe(call));
    match called {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or(panic.downcast_ref::<&str>().copied());
            Err(format!(
                "it is damaged, or beyond the crate tokenizers, which panicked: {}",
                text.unwrap_or("without a sentence")
            ))
        }
    }
}

/// The parts of a `tokenizer.json` that process text; its vocabulary may have any words.
const PROCESSORS: [&str; 4] = ["normalizer", "pre_tokenizer", "post_processor", "decoder"];

/// Refuses what panics, or takes memory without bound, in the crate tokenizers, and what makes tokens depend on chance.
pub(super) fn check(bytes: &[u8]) -> Result<(), String> {
    let json: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    for part in PROCESSORS {
        check_processor(part, &json[part])?;
    }
    let dropout = &json["model"]["dropout"];
    match dropout.is_null() || dropout.as_f64() == Some(0.0) {
        true => Ok(()),
        false => Err(format!("its dropout is {dropout}; supported: null, 0")),
    }
}

/// Refuses a processor, or one within it.
fn check_processor(part: &str, json: &Value) -> Result<(), String> {
    match json {
        Value::Array(all) => all.iter().try_for_each(|one| check_processor(part, one)),
        Value::Object(object) => {
            let kind = json["type"].as_str().unwrap_or_default();
            let is_empty = |value: &Value| value.as_str() == Some("");
            let pattern = &json["pattern"];
            let wrong = match kind {
                _ if kind == "Precompiled" || object.contains_key("precompiled_charsmap") => {
                    Some("a precompiled map of characters, which is not supported")
                }
                "Prepend" if is_empty(&json["prepend"]) => Some("a Prepend of nothing"),
                "FixedLength" if json["length"] == 0 => Some("a FixedLength of 0"),
                _ if is_empty(&pattern["String"]) || is_empty(&pattern["Regex"]) => {
                    Some("an empty pattern")
                }
                _ => None,
            };
            match wrong {
                Some(wrong) => Err(format!("its {part} has {wrong}")),
                None => object
                    .values()
                    .try_for_each(|one| check_processor(part, one)),
            }
        }
        _ => Ok(()),
    }
}
