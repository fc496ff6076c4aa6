//! The metadata of a GGUF file: values by key, read by type, and the keys that nothing has read.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
};

/// A value; numbers of all widths are the widest ones.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Integer(i128),
    Float(f64),
    Flag(bool),
    Text(String),
    Integers(Vec<i64>),
    Floats(Vec<f32>),
    Texts(Vec<String>),
}

impl Value {
    /// An array of numbers, which are all of one type.
    pub fn numbers(numbers: impl Iterator<Item = Result<Value, String>>) -> Result<Value, String> {
        let (mut integers, mut floats) = (Vec::new(), Vec::new());
        for number in numbers {
            match number? {
                Value::Float(x) => floats.push(x as f32),
                Value::Integer(x) => integers
                    .push(i64::try_from(x).map_err(|_| format!("an array of its header has {x}"))?),
                _ => return Err("an array of its header has no numbers".to_owned()),
            }
        }
        Ok(match floats.is_empty() {
            true => Value::Integers(integers),
            false => Value::Floats(floats),
        })
    }

    /// The type and the value, or the length of an array, in a few words.
    fn words(&self) -> String {
        match self {
            Value::Integer(x) => x.to_string(),
            Value::Float(x) => format!("the float {x}"),
            Value::Flag(x) => x.to_string(),
            Value::Text(x) => format!("the string {:?}", x.chars().take(64).collect::<String>()),
            Value::Integers(x) => format!("an array of {} integers", x.len()),
            Value::Floats(x) => format!("an array of {} floats", x.len()),
            Value::Texts(x) => format!("an array of {} strings", x.len()),
        }
    }
}

/// Values by key.
#[derive(Default)]
pub(super) struct Metadata {
    values: BTreeMap<String, Value>,
    read: RefCell<BTreeSet<String>>,
}

impl Metadata {
    /// Adds a value; refuses a key that is there.
    pub fn insert(&mut self, key: String, value: Value) -> Result<(), String> {
        match self.values.insert(key.clone(), value) {
            None => Ok(()),
            Some(_) => Err(format!("its metadata has the key {key:?} twice")),
        }
    }

    /// A value of a type; none if the key is missing.
    fn get<T>(
        &self,
        key: &str,
        allowed: &str,
        of: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        self.read.borrow_mut().insert(key.to_owned());
        let Some(value) = self.values.get(key) else {
            return Ok(None);
        };
        let read = of(value).map(Some);
        read.ok_or_else(|| format!("{key} is {}; allowed: {allowed}", value.words()))
    }

    pub fn text(&self, key: &str) -> Result<Option<String>, String> {
        self.get(key, "a string", |value| match value {
            Value::Text(text) => Some(text.clone()),
            _ => None,
        })
    }

    /// A whole number from 0 on, whatever its width.
    pub fn count(&self, key: &str) -> Result<Option<usize>, String> {
        self.get(key, "one whole number from 0 on", |value| match value {
            Value::Integer(x) => usize::try_from(*x).ok(),
            _ => None,
        })
    }

    /// A number above 0.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, String> {
        self.get(key, "a finite float above 0", |value| match value {
            Value::Float(x) if x.is_finite() && *x > 0.0 => Some(*x),
            _ => None,
        })
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>, String> {
        self.get(key, "true, false", |value| match value {
            Value::Flag(x) => Some(*x),
            _ => None,
        })
    }

    /// Strings; an array without elements is one of every type.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>, String> {
        self.get(key, "an array of strings", |value| match value {
            Value::Texts(texts) => Some(texts.clone()),
            Value::Integers(none) if none.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, String> {
        self.get(key, "an array of integers", |value| match value {
            Value::Integers(x) => Some(x.clone()),
            _ => None,
        })
    }

    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, String> {
        self.get(key, "an array of floats", |value| match value {
            Value::Floats(x) => Some(x.clone()),
            Value::Integers(none) if none.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    /// Keys that nothing has read.
    pub fn unread(&self) -> Vec<&str> {
        let read = self.read.borrow();
        let keys = self.values.keys().map(String::as_str);
        keys.filter(|key| !read.contains(*key)).collect()
    }
}

/// The value of a key that must be there.
pub(super) fn needed<T>(value: Option<T>, key: &str) -> Result<T, String> {
    value.ok_or_else(|| format!("its metadata has no {key}"))
}
