//! The entries of a JSON object, read by type, and those that nothing has read.

use std::{cell::RefCell, collections::BTreeSet};

use serde_json::{Map, Value};

/// An object, and which of its keys were read. A key that is missing and one that is null are alike; a value of another type is an error.
pub(super) struct Fields<'a> {
    /// The begin of a sentence on a key: `its`, or `in its rope_scaling,`.
    whose: String,
    object: &'a Map<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    pub fn new(whose: &str, object: &'a Map<String, Value>) -> Self {
        Fields {
            whose: whose.to_owned(),
            object,
            read: RefCell::default(),
        }
    }

    /// The value of a key; none if it is missing or null.
    pub fn value(&self, key: &str) -> Option<&'a Value> {
        self.read.borrow_mut().insert(key.to_owned());
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// The sentence that refuses a key's value.
    pub fn refusal(&self, key: &str, value: &Value, allowed: &str) -> String {
        let mut text = value.to_string();
        if let Some((end, _)) = text.char_indices().nth(200) {
            text.replace_range(end.., " …");
        }
        format!("{} {key} is {text}; supported: {allowed}", self.whose)
    }

    fn get<T>(
        &self,
        key: &str,
        allowed: &str,
        of: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let read = of(value).map(Some);
        read.ok_or_else(|| self.refusal(key, value, allowed))
    }

    /// A whole number from 1 on.
    pub fn count(&self, key: &str) -> Result<Option<usize>, String> {
        self.get(key, "a whole number from 1 on", |value| {
            let number = value.as_u64().and_then(|x| usize::try_from(x).ok());
            number.filter(|x| *x > 0)
        })
    }

    /// A finite number above 0.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, String> {
        self.get(key, "a finite number above 0", |value| {
            value.as_f64().filter(|x| x.is_finite() && *x > 0.0)
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        self.get(key, "true, false", Value::as_bool)
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, String> {
        self.get(key, "a string", Value::as_str)
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>, String> {
        self.get(key, "an object", Value::as_object)
    }

    /// The value of a key that must be there.
    pub fn needed<T>(&self, value: Option<T>, key: &str) -> Result<T, String> {
        value.ok_or_else(|| format!("{} {key} is missing", self.whose))
    }

    /// Keys that nothing has read and whose values are not null.
    pub fn unread(&self) -> Vec<&'a str> {
        let read = self.read.borrow();
        let entries = self.object.iter().filter(|(_, value)| !value.is_null());
        let keys = entries.map(|(key, _)| key.as_str());
        keys.filter(|key| !read.contains(*key)).collect()
    }
}
