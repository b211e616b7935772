//! Random ids, API keys and seeds.

use anyhow::{Result, anyhow};
use ring::rand::{SecureRandom, SystemRandom};

/// Returns `prefix` followed by 24 random hexadecimal digits.
pub fn new(prefix: &str) -> String {
    format!("{prefix}{}", hex(&random::<12>()))
}

/// Returns a random API key. Fails if the operating system provides no random numbers.
pub fn api_key() -> Result<String> {
    let mut bytes = [0; 24];
    SystemRandom::new().fill(&mut bytes).map_err(|_| anyhow!("cannot make an API key: no random numbers available"))?;
    Ok(format!("inferno-{}", hex(&bytes)))
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // `fill` fails only if the operating system provides no random numbers.
    // Ids and seeds can then repeat, but requests still succeed.
    let _ = SystemRandom::new().fill(&mut bytes);
    bytes
}

/// Returns bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a random seed that is short enough for a person to retype.
pub fn random_u32() -> u32 {
    u32::from_le_bytes(random())
}
