//! For backends: the settings that an environment variable holds, `key=value` with commas between, such as `ATTN_CPU=isa=portable,pin=0`.

use std::ffi::OsString;

use crate::error::Unsupported;

/// The settings of one environment variable, each given once at most.
#[derive(Debug)]
pub struct Settings {
    backend: &'static str,
    variable: &'static str,
    given: Vec<(String, String)>,
}

impl Settings {
    /// Reads the variable, which may be unset or empty.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] of `backend` for a key that is not among `keys` or comes twice, and for a value that is not UTF-8.
    pub fn from_env(
        backend: &'static str,
        variable: &'static str,
        keys: &[&str],
    ) -> Result<Self, Unsupported> {
        Self::read(backend, variable, std::env::var_os(variable), keys)
    }

    fn read(
        backend: &'static str,
        variable: &'static str,
        value: Option<OsString>,
        keys: &[&str],
    ) -> Result<Self, Unsupported> {
        let mut settings = Settings {
            backend,
            variable,
            given: Vec::new(),
        };
        let Some(value) = value.filter(|value| !value.is_empty()) else {
            return Ok(settings);
        };
        let refuse = |allowed: &str| settings.refused(format_args!("{value:?}"), allowed);
        let text = value.to_str().ok_or_else(|| refuse("UTF-8"))?;
        let mut given: Vec<(String, String)> = Vec::new();
        for setting in text.split(',') {
            let pair = setting.split_once('=');
            let known = pair.filter(|(key, _)| {
                keys.contains(key) && given.iter().all(|(before, _)| before != key)
            });
            let (key, value) = known.ok_or_else(|| {
                let keys: Vec<_> = keys.iter().map(|key| format!("{key}=…")).collect();
                let each = "each once at most, with commas between";
                refuse(&format!("{}, {each}", keys.join(", ")))
            })?;
            given.push((key.to_owned(), value.to_owned()));
        }
        settings.given = given;
        Ok(settings)
    }

    /// The setting of this key, read by `parse`; `None` where it is not given, or empty.
    ///
    /// `parse` says of a value that it refuses what is allowed, such as `auto, never`.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for a value that `parse` refuses.
    pub fn get<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, Unsupported> {
        let given = self.given.iter().find(|(of, _)| of == key);
        let Some((_, value)) = given.filter(|(_, value)| !value.is_empty()) else {
            return Ok(None);
        };
        let refuse = |allowed: String| self.refused(format_args!("\"{key}={value}\""), &allowed);
        parse(value).map(Some).map_err(refuse)
    }

    /// The setting of a key that is on or off: `1` or `0`.
    ///
    /// # Errors
    /// [`Unsupported::Absent`] for another value.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, Unsupported> {
        self.get(key, |text| match text {
            "1" => Ok(true),
            "0" => Ok(false),
            _ => Err("1, 0".to_owned()),
        })
    }

    fn refused(&self, given: std::fmt::Arguments<'_>, allowed: &str) -> Unsupported {
        Unsupported::Absent {
            backend: self.backend,
            reason: format!("{} has {given}; allowed: {allowed}", self.variable),
            next_step: "set it to one of these, or leave it unset".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Option<OsString>) -> Result<Settings, Unsupported> {
        Settings::read("cpu", "SETTINGS", value, &["number", "pin"])
    }

    fn number(text: &str) -> Result<Option<u8>, Unsupported> {
        let parse = |text: &str| {
            let parsed = text.parse();
            parsed.map_err(|_| "0 to 255".to_owned())
        };
        read(Some(text.into()))?.get("number", parse)
    }

    #[test]
    fn a_setting_is_read_or_refused_and_never_ignored() {
        for unset in [None, Some(OsString::new())] {
            assert_eq!(read(unset).unwrap().flag("pin"), Ok(None));
        }
        let both = read(Some("number=7,pin=0".into())).unwrap();
        assert_eq!(both.flag("pin"), Ok(Some(false)));
        assert_eq!(number("pin=1,number=7"), Ok(Some(7)));
        assert_eq!((number("number="), number("pin=0")), (Ok(None), Ok(None)));
        let keys = "number=…, pin=…, each once at most";
        for (given, said) in [
            (
                "number=x ",
                "SETTINGS has \"number=x \"; allowed: 0 to 255; ",
            ),
            ("other=1", keys),
            ("number", keys),
            ("number=1,", keys),
            ("number=1, pin=0", keys),
            ("number=1,number=2", keys),
        ] {
            let refusal = number(given).unwrap_err().to_string();
            assert!(refusal.contains(said), "{given}: {refusal}");
        }
        let refusal = read(Some("pin=2".into())).unwrap().flag("pin");
        assert!(refusal.unwrap_err().to_string().contains("allowed: 1, 0"));
        #[cfg(unix)]
        {
            use std::os::unix::ffi::OsStringExt;
            let refusal = read(Some(OsString::from_vec(vec![b'7', 0xff]))).unwrap_err();
            let said = refusal.to_string();
            assert!(
                said.contains("SETTINGS has \"7\\xFF\"; allowed: UTF-8"),
                "{said}"
            );
        }
    }
}
