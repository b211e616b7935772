//! The sampling parameters, defined in one table.
//!
//! Each row defines one parameter: its names, type, neutral value, range and help text, and when the model's
//! generation_config.json sets it. The names are:
//!
//! - the flag of `inferno play`, which is also the name for `/set`, in `config.toml` and in saved conversations
//! - the field of a JSON request, of generation_config.json and of [`SamplingParams`].
//!   Ollama's API has its own name for the repetition penalty: `repeat_penalty`.
//!
//! On a CPU, [`Sampler`](super::Sampler) applies the parameters. On a GPU, kernels apply them.
//! docs/contributing.md lists the code to change for a new parameter.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use serde_json::Value;

use crate::text::excerpt;

/// Defines [`SamplingParams`] and [`SAMPLING_FIELDS`] from rows of this form:
///
/// `field: type, "flag" "VALUE_NAME", neutral: value, range: from..=to, generation_config: when, help: "text";`
macro_rules! sampling_table {
    ($(
        $(#[$doc:meta])*
        $field:ident: $type:ty, $flag:literal $value_name:literal, neutral: $neutral:expr, range: $range:expr,
        generation_config: $when:ident, help: $help:literal;
    )*) => {
        /// How to sample tokens: one field per row of the sampling table.
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        pub struct SamplingParams {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl SamplingParams {
            /// Returns the parameters of greedy sampling: the neutral value of every row.
            pub fn greedy() -> Self {
                Self { $($field: $neutral,)* }
            }
        }

        /// The rows of the sampling table.
        pub static SAMPLING_FIELDS: &[SamplingField] = &[$(
            SamplingField {
                name: stringify!($field),
                flag: $flag,
                value_name: $value_name,
                help: $help,
                generation_config: GenerationConfigUse::$when,
                expected: || expected(&$range),
                is_valid: |params| $range.contains(&params.$field),
                get: |params| params.$field.to_string(),
                set_text: |params, text| set(&mut params.$field, text.parse().ok(), &$range),
                set_json: |params, json| set(&mut params.$field, <$type>::from_json(json), &$range),
            },
        )*];
    };
}

sampling_table! {
    /// The temperature, by which logits are divided. 0 always selects the most likely token.
    temperature: f32, "temperature" "X", neutral: 0.0, range: 0.0..=100.0, generation_config: WhenSampling,
    help: "Sampling temperature; 0 always selects the most likely token";

    /// How many of the most likely tokens to sample from. 0 keeps all tokens.
    top_k: usize, "top-k" "K", neutral: 0, range: 0..=usize::MAX, generation_config: WhenSampling,
    help: "Sample only from the K most likely tokens; 0 for all";

    /// Only the smallest set of most likely tokens with at least this total probability is kept. 1 keeps all tokens.
    top_p: f32, "top-p" "P", neutral: 1.0, range: 0.0..=1.0, generation_config: WhenSampling,
    help: "Sample only from the most likely tokens with a total probability of at least P; 1 for all";

    /// The minimum probability of a token, as a fraction of the most likely token's probability. 0 keeps all tokens.
    min_p: f32, "min-p" "P", neutral: 0.0, range: 0.0..=1.0, generation_config: WhenSampling,
    help: "Minimum probability of a token relative to the most likely token; 0 keeps all tokens";

    /// The penalty on tokens in the prompt or the answer (arXiv 1909.05858). 1 has no effect.
    repetition_penalty: f32, "repetition-penalty" "X", neutral: 1.0, range: 0.01..=100.0, generation_config: Always,
    help: "Penalty on tokens that have already occurred; 1 for none";

    /// The penalty on a token for each time it was generated, as in OpenAI's API. 0 has no effect.
    frequency_penalty: f32, "frequency-penalty" "X", neutral: 0.0, range: -100.0..=100.0, generation_config: Never,
    help: "Penalty on a token for each time it was generated; 0 for none";

    /// The penalty on a token that was generated at least once, as in OpenAI's API. 0 has no effect.
    presence_penalty: f32, "presence-penalty" "X", neutral: 0.0, range: -100.0..=100.0, generation_config: Never,
    help: "Penalty on a token that was generated at least once; 0 for none";

    /// The seed of the random numbers. Equal requests with the same seed get the same tokens,
    /// as long as the model computes the same logits.
    seed: u64, "seed" "SEED", neutral: 0, range: 0..=u64::MAX, generation_config: Never,
    help: "Seed of the random numbers for sampling [default: random]";
}

/// One row of the sampling table, which describes one parameter.
pub struct SamplingField {
    /// The name of the field in [`SamplingParams`], such as `top_p`.
    /// generation_config.json and JSON requests use the same name, except for `repeat_penalty` in Ollama's API.
    pub name: &'static str,
    /// The name of the flag, such as `top-p`. `/set`, `config.toml` and saved conversations use this name too.
    pub flag: &'static str,
    /// The placeholder for the value in `--help`, such as `P` in `--top-p <P>`.
    pub value_name: &'static str,
    /// The description of the flag in `--help`.
    pub help: &'static str,
    /// When the parameter is read from a model's generation_config.json.
    pub generation_config: GenerationConfigUse,
    expected: fn() -> String,
    is_valid: fn(&SamplingParams) -> bool,
    get: fn(&SamplingParams) -> String,
    set_text: fn(&mut SamplingParams, &str) -> Result<(), String>,
    set_json: fn(&mut SamplingParams, &Value) -> Result<(), String>,
}

/// When a sampling parameter is read from a model's generation_config.json.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationConfigUse {
    Always,
    /// Only with `"do_sample": true`, as in transformers.
    WhenSampling,
    Never,
}

impl SamplingField {
    /// Returns the row whose flag is `flag`, such as `top-p`, or `None` if there is none.
    pub fn find(flag: &str) -> Option<&'static SamplingField> {
        SAMPLING_FIELDS.iter().find(|field| field.flag == flag)
    }

    /// Returns the value of the row's parameter in `params` as text.
    pub fn get(&self, params: &SamplingParams) -> String {
        (self.get)(params)
    }

    /// Parses text and sets the parameter. If the value is invalid, fails with an error such as
    /// `expected a number from 0 to 1`, and changes nothing.
    pub fn set(&self, params: &mut SamplingParams, text: &str) -> Result<(), String> {
        (self.set_text)(params, text)
    }
}

impl SamplingParams {
    /// Fails if a parameter is out of range or NaN. The error names the first such parameter.
    pub fn validate(&self) -> Result<(), String> {
        match SAMPLING_FIELDS.iter().find(|field| !(field.is_valid)(self)) {
            Some(field) => Err(format!("{} is {}: {}", field.flag, field.get(self), (field.expected)())),
            None => Ok(()),
        }
    }

    /// Returns the sampling defaults in a model's generation_config.json, or greedy sampling if the JSON is null.
    ///
    /// Without `"do_sample": true`, reads only the repetition penalty. The other parameters are those of
    /// greedy sampling, as in transformers. With `"do_sample": true`, the default temperature is 1.
    ///
    /// Ignores values that are invalid or out of range, and returns a message about each of them,
    /// such as `top_p is 1.5: expected a number from 0 to 1; using 1 instead`.
    pub fn from_generation_config(generation_config: &Value) -> (Self, Vec<String>) {
        let do_sample = &generation_config["do_sample"];
        let is_sampling = do_sample.as_bool() == Some(true);
        let mut params = Self::greedy();
        let mut ignored = Vec::new();
        if !do_sample.is_null() && !do_sample.is_boolean() {
            let value = excerpt(&do_sample.to_string());
            ignored.push(format!("do_sample is {value}: expected true or false; using false instead"));
        }
        if is_sampling {
            params.temperature = 1.0;
        }
        for field in SAMPLING_FIELDS {
            let is_used = match field.generation_config {
                GenerationConfigUse::Always => true,
                GenerationConfigUse::WhenSampling => is_sampling,
                GenerationConfigUse::Never => false,
            };
            let value = &generation_config[field.name];
            // Accept a top-k of -1, which keeps all tokens in vLLM. Some models have it in generation_config.json.
            let is_neutral = field.name == "top_k" && value.as_i64() == Some(-1);
            if !is_used || value.is_null() || is_neutral {
                continue;
            }
            if let Err(expected) = (field.set_json)(&mut params, value) {
                let (value, default) = (excerpt(&value.to_string()), field.get(&params));
                ignored.push(format!("{} is {value}: {expected}; using {default} instead", field.name));
            }
        }
        (params, ignored)
    }
}

/// The value type of a sampling parameter.
trait FieldType: FromStr + Display + PartialOrd {
    /// The name of the type in error messages.
    const KIND: &'static str;
    /// The maximum of an integer type, which error messages do not name as an upper bound. `None` for floats.
    const UNBOUNDED: Option<Self>;

    fn from_json(json: &Value) -> Option<Self>;
}

impl FieldType for f32 {
    const KIND: &'static str = "a number";
    const UNBOUNDED: Option<f32> = None;

    fn from_json(json: &Value) -> Option<f32> {
        json.as_f64().map(|value| value as f32)
    }
}

impl FieldType for usize {
    const KIND: &'static str = "a whole number";
    const UNBOUNDED: Option<usize> = Some(usize::MAX);

    fn from_json(json: &Value) -> Option<usize> {
        json.as_u64().map(|value| value as usize)
    }
}

impl FieldType for u64 {
    const KIND: &'static str = "a whole number";
    const UNBOUNDED: Option<u64> = Some(u64::MAX);

    fn from_json(json: &Value) -> Option<u64> {
        json.as_u64()
    }
}

/// Returns an error message that describes the valid values, such as `expected a number from 0 to 1`.
fn expected<T: FieldType>(range: &RangeInclusive<T>) -> String {
    match T::UNBOUNDED {
        Some(unbounded) if *range.end() == unbounded => format!("expected {}, {} or more", T::KIND, range.start()),
        _ => format!("expected {} from {} to {}", T::KIND, range.start(), range.end()),
    }
}

/// Sets `field` to `parsed`, which is `None` if the text or the JSON value is not a number of this type.
/// Fails if `parsed` is `None`, or if the number is out of range or NaN.
fn set<T: FieldType>(field: &mut T, parsed: Option<T>, range: &RangeInclusive<T>) -> Result<(), String> {
    let value = parsed.filter(|value| range.contains(value)).ok_or_else(|| expected(range))?;
    *field = value;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_spelled_consistently_and_round_trips() {
        for field in SAMPLING_FIELDS {
            assert_eq!(field.flag, field.name.replace('_', "-"));
            assert!(!field.help.is_empty() && !field.value_name.is_empty());
            let mut params = SamplingParams::greedy();
            field.set(&mut params, "1").unwrap();
            assert_eq!(field.get(&params), "1");
            assert_eq!(SamplingField::find(field.flag).unwrap().name, field.name);
            assert!(field.set(&mut params, "nonsense").unwrap_err().starts_with("expected"));
        }
        assert!(SamplingParams::greedy().validate().is_ok());
    }

    #[test]
    fn values_outside_their_range_are_errors() {
        let mut params = SamplingParams::greedy();
        let top_p = SamplingField::find("top-p").unwrap();
        assert_eq!(top_p.set(&mut params, "1.5").unwrap_err(), "expected a number from 0 to 1");
        assert_eq!(top_p.set(&mut params, "NaN").unwrap_err(), "expected a number from 0 to 1");
        let seed = SamplingField::find("seed").unwrap();
        assert_eq!(seed.set(&mut params, "-1").unwrap_err(), "expected a whole number, 0 or more");
        assert_eq!(params, SamplingParams::greedy());
        params.temperature = f32::NAN;
        assert_eq!(params.validate().unwrap_err(), "temperature is NaN: expected a number from 0 to 100");
    }

    #[test]
    fn generation_config_without_do_sample_is_greedy() {
        let read = |json| SamplingParams::from_generation_config(&json).0;
        let greedy = SamplingParams::greedy();
        assert_eq!(read(Value::Null), greedy);
        let penalty = SamplingParams { repetition_penalty: 1.5, ..greedy.clone() };
        assert_eq!(read(serde_json::json!({ "temperature": 0.5, "repetition_penalty": 1.5 })), penalty);
        let sampling = SamplingParams { temperature: 1.0, top_k: 7, ..greedy };
        assert_eq!(read(serde_json::json!({ "do_sample": true, "top_k": 7, "seed": 3 })), sampling);
    }

    /// Invalid defaults must be ignored, because requests that do not set the parameter would fail with them.
    #[test]
    fn generation_config_with_invalid_values_is_ignored() {
        let defaults = SamplingParams { temperature: 1.0, ..SamplingParams::greedy() };
        for (json, message) in [
            (r#"{"temperature": -1}"#, "temperature is -1: expected a number from 0 to 100; using 1 instead"),
            (r#"{"temperature": "NaN"}"#, "temperature is \"NaN\": expected a number from 0 to 100; using 1 instead"),
            (r#"{"top_k": -5}"#, "top_k is -5: expected a whole number, 0 or more; using 0 instead"),
            (r#"{"top_k": 2.5}"#, "top_k is 2.5: expected a whole number, 0 or more; using 0 instead"),
            (r#"{"top_p": 1.5}"#, "top_p is 1.5: expected a number from 0 to 1; using 1 instead"),
            (r#"{"min_p": [0]}"#, "min_p is [0]: expected a number from 0 to 1; using 0 instead"),
            (
                r#"{"repetition_penalty": 0}"#,
                "repetition_penalty is 0: expected a number from 0.01 to 100; using 1 instead",
            ),
            (
                r#"{"repetition_penalty": 1e39}"#,
                "repetition_penalty is 1e+39: expected a number from 0.01 to 100; using 1 instead",
            ),
        ] {
            let mut json: Value = serde_json::from_str(json).unwrap();
            json["do_sample"] = true.into();
            let (params, ignored) = SamplingParams::from_generation_config(&json);
            assert_eq!((params, ignored), (defaults.clone(), vec![message.to_string()]), "{json}");
        }
        let json = serde_json::json!({
            "do_sample": true, "temperature": null, "top_k": -1, "top_p": 0.5, "frequency_penalty": 1000, "seed": "x"
        });
        let (params, ignored) = SamplingParams::from_generation_config(&json);
        assert_eq!((params.top_k, params.top_p, params.validate()), (0, 0.5, Ok(())));
        assert!(ignored.is_empty(), "a null, a top_k of -1 or an unread field must not cause a message: {ignored:?}");
        let (params, ignored) = SamplingParams::from_generation_config(&serde_json::json!({ "do_sample": "true" }));
        assert_eq!(params, SamplingParams::greedy());
        assert_eq!(ignored, [r#"do_sample is "true": expected true or false; using false instead"#]);
    }
}
