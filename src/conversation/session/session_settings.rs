//! The methods of [`Session`] for its settings.

use super::Session;
use crate::conversation::journal::ConversationChange;
use crate::conversation::overflow::Overflow;
use crate::conversation::settings::{self, ChatSettings, SettingValues};
use crate::engine::SamplingParams;

impl Session {
    /// Changes a setting and saves it for `--resume`. Returns a message for the user.
    pub fn change_setting(&mut self, name: &str, value: &str) -> Result<String, String> {
        let (name, value) = settings::normalize(name, value)?;
        self.settings.set(name, std::slice::from_ref(&value))?;
        if self.settings.overflow == Overflow::Stop {
            // With `stop`, the next turn sends all messages.
            self.dropped = 0;
        }
        // Also store the value `none` of `max-tokens` or `stop`, because it must override a value from the
        // configuration file.
        self.requested.insert(name.to_string(), vec![value.clone()]);
        self.record(ConversationChange::Settings)
            .map_err(|error| format!("the setting is not saved for --resume: {error:#}"))?;
        Ok(match (name, value.as_str()) {
            ("hide-reasoning", "true") => "reasoning is hidden".to_string(),
            ("hide-reasoning", _) => "reasoning is shown".to_string(),
            _ => format!("{name} is {}", self.settings.get(name)),
        })
    }

    /// Returns the value of a setting as text, or `chosen by the server`.
    pub fn setting(&self, name: &str) -> String {
        let is_chosen_by_server = self.backend().defaults().is_none() && settings::has_server_default(name);
        if is_chosen_by_server && !self.all_settings().contains_key(name) {
            return "chosen by the server".to_string();
        }
        self.settings.get(name)
    }

    /// Resets all settings except the seed to their defaults, then applies configured and requested settings.
    ///
    /// Returns a message for each setting that is invalid.
    pub(super) fn reset_settings(&mut self, sampling: SamplingParams) -> Vec<String> {
        let seed = self.settings.sampling.seed;
        self.settings = ChatSettings::new(SamplingParams { seed, ..sampling });
        let mut problems = Vec::new();
        // Skip flags that are not chat settings, such as --device.
        for (name, values) in self.all_settings().iter().filter(|(name, _)| settings::is_setting(name)) {
            if let Err(problem) = self.settings.set(name, values) {
                problems.push(format!("{name} stays {}: {problem}", self.settings.get(name)));
            }
        }
        problems
    }

    /// Returns the configured settings, overridden by the requested settings.
    pub fn all_settings(&self) -> SettingValues {
        self.configured.clone().into_iter().chain(self.requested.clone()).collect()
    }
}
