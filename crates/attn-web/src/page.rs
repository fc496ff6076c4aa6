//! What the page's script calls. Figures are JSON, errors are sentences.

use attn::{
    KvFormat,
    backends::{
        cpu::CpuBackend,
        wgpu::{Options, WgpuBackend},
    },
};
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::measure::{self, FORMATS, Inputs, Measured, measure};

#[wasm_bindgen]
extern "C" {
    /// Milliseconds.
    #[wasm_bindgen(js_namespace = performance)]
    fn now() -> f64;
}

/// An error with its causes, as one text.
fn sentence(error: impl Into<anyhow::Error>) -> JsError {
    JsError::new(&format!("{:#}", error.into()))
}

/// A file's layers.
#[wasm_bindgen]
pub struct File(Inputs);

#[wasm_bindgen]
impl File {
    /// Reads the bytes of a file.
    #[wasm_bindgen(constructor)]
    pub fn new(bytes: &[u8]) -> Result<File, JsError> {
        Ok(File(Inputs::read(bytes).map_err(sentence)?))
    }

    /// Its shape, in words.
    pub fn describe(&self) -> String {
        self.0.describe()
    }

    /// The contexts to offer.
    pub fn contexts(&self) -> Vec<usize> {
        self.0.contexts()
    }

    /// Its first tokens.
    pub fn at(&self, context: usize) -> Result<File, JsError> {
        Ok(File(self.0.at(context).map_err(sentence)?))
    }
}

/// A device of this browser.
#[wasm_bindgen]
pub struct Device(measure::Device);

#[wasm_bindgen]
impl Device {
    /// WebGPU.
    pub async fn gpu() -> Result<Device, JsError> {
        let backend = WgpuBackend::open_async(&Options::default()).await;
        let backend = backend.map_err(sentence)?;
        Ok(Device(measure::Device::Gpu(backend)))
    }

    /// The CPU, on this thread.
    pub fn cpu() -> Device {
        Device(measure::Device::Cpu(Box::new(CpuBackend::new())))
    }

    /// Its name, and what it says of itself.
    pub fn describe(&self) -> Vec<String> {
        self.0.describe().into()
    }

    /// Compares the device's arithmetic with the CPU's: JSON with `tried` and `differing` of what formats with promised bits rely on, and the first sentence
    /// about a difference.
    pub async fn arithmetic(&self) -> Result<String, JsError> {
        let measure::Device::Gpu(backend) = &self.0 else {
            return Ok(json!({"tried": 0, "differing": 0}).to_string());
        };
        let checks = backend.check_arithmetic_async().await.map_err(sentence)?;
        let relied_on: Vec<_> = checks.iter().filter(|check| check.relied_on).collect();
        let sum = |of: fn(&attn::backends::wgpu::ArithmeticCheck) -> usize| -> usize {
            relied_on.iter().map(|check| of(check)).sum()
        };
        let first = relied_on.iter().find(|check| check.differing > 0);
        let value = json!({
            "functions": relied_on.len(), "tried": sum(|check| check.tried), "differing": sum(|check| check.differing),
            "first": first.map(ToString::to_string),
        });
        Ok(value.to_string())
    }

    /// Attends a file's layers in a format: `Measured` as JSON, with `promised`, whether the bits are specified.
    pub async fn measure(&self, file: &File, format: &str) -> Result<String, JsError> {
        let format: KvFormat = format.parse().map_err(sentence)?;
        let measured: Measured = measure(&self.0, &file.0, format, Some(now))
            .await
            .map_err(sentence)?;
        let mut value = measured.value();
        value["promised"] = format.is_integer().into();
        Ok(value.to_string())
    }
}

/// The names of the formats that the page compares.
#[wasm_bindgen]
pub fn formats() -> Vec<String> {
    FORMATS.map(str::to_owned).into()
}

/// A panic is an error in attn: its text goes to the console, where the page's script finds it, too.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|panic| {
        wasm_bindgen::throw_str(&format!("attn panicked: {panic}"))
    }));
}
